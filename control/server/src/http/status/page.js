'use strict';
// Fetches /status.json once a second and shows it. Text from outside is inserted as text only, never as markup.
const at = id => document.getElementById(id);
const make = (tag, kind, text) => {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
};
const put = (node, text) => { if (node.textContent !== text) node.textContent = text; };

// Formatting of numbers.
const whole = value => Math.round(value).toLocaleString('en-US');
const few = value => value === null || !isFinite(value) ? '–'
  : value >= 100 ? whole(value) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
const percent = part => part === null || !isFinite(part) ? '–' : (part * 100).toFixed(1) + ' %';
const scaled = (value, step, units) => {
  let unit = 0;
  while (value >= step && unit < units.length - 1) { value /= step; unit += 1; }
  return (unit === 0 ? whole(value) : few(value)) + (units[unit] ? ' ' + units[unit] : '');
};
const bytes = value => value === null ? '–' : scaled(value, 1024, ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB']);
const many = value => value < 100000 ? whole(value) : scaled(value, 1000, ['', 'k', 'M', 'G', 'T']);
const spans = [[1e6, 1e3, ' µs'], [1e9, 1e6, ' ms'], [12e10, 1e9, ' s'], [72e11, 6e10, ' min'], [1728e11, 36e11, ' h']];
const span = ns => {
  const [, unit, name] = spans.find(([most]) => ns < most) || [0, 864e11, ' d'];
  return (unit === 1e3 || unit === 6e10 ? whole(ns / unit) : few(ns / unit)) + name;
};
const ratio = (part, all) => all > 0 ? part / all : null;
const sum = (rows, of) => rows.reduce((all, row) => all + of(row), 0);

// Tables: a column has a head, a kind, and a function for a row's cell: text, or {text, part, kind, title, swatch}.
const tables = new Map();
function show(id, columns, rows, key, empty) {
  const table = at(id), none = at('no-' + id);
  table.hidden = rows.length === 0;
  none.hidden = rows.length > 0;
  put(none, empty);
  let known = tables.get(id);
  if (!known) {
    const head = make('tr');
    for (const column of columns) {
      const cell = make('th', column.kind, column.head);
      cell.scope = 'col';
      head.append(cell);
    }
    const top = make('thead'), body = make('tbody');
    top.append(head);
    table.append(top, body);
    tables.set(id, known = { body, rows: new Map() });
  }
  const seen = new Set();
  rows.forEach((row, place) => {
    const name = key(row);
    seen.add(name);
    let line = known.rows.get(name);
    if (!line) {
      line = make('tr');
      columns.forEach(column => line.append(make('td', column.kind)));
      line.onmouseenter = () => { if (line.owner !== undefined) point(line.owner); };
      line.onmouseleave = () => { if (line.owner !== undefined) point(null); };
      known.rows.set(name, line);
    }
    line.owner = row.owner_place;
    if (known.body.children[place] !== line) known.body.insertBefore(line, known.body.children[place] || null);
    columns.forEach((column, number) => fill(line.children[number], column.kind, column.cell(row)));
  });
  for (const [name, line] of known.rows) if (!seen.has(name)) { line.remove(); known.rows.delete(name); }
}
function fill(cell, kind, what) {
  if (typeof what !== 'object') what = { text: String(what) };
  const kinds = [kind, what.kind].filter(Boolean).join(' ');
  if (cell.className !== kinds) cell.className = kinds;
  const title = what.title || (kind && kind.includes('name') ? what.text : '');
  if (cell.title !== title) cell.title = title;
  if (what.part === undefined && what.swatch === undefined) return put(cell, what.text);
  if (!cell.firstElementChild) {
    const holder = make('div', what.part === undefined ? '' : 'bar');
    holder.append(make('span'), make(what.part === undefined ? 'b' : 'i', what.part === undefined ? 'swatch' : ''));
    cell.append(holder);
  }
  const [text, mark] = cell.firstElementChild.children;
  put(text, what.text);
  if (what.part === undefined) {
    mark.style.background = what.swatch;
  } else {
    cell.firstElementChild.className = what.part === null ? 'bar none' : 'bar';
    mark.style.setProperty('--part', Math.min(100, Math.max(0, what.part * 100)).toFixed(1) + '%');
  }
}

// Samples of the last minute, for rates.
let past = [];
function remember(now, seen) {
  const last = past[past.length - 1];
  if (last && Object.keys(seen).some(name => seen[name] < last.seen[name])) past = [];
  past.push({ now, seen });
  while (past.length > 61) past.shift();
}
const grown = name => past.length < 2 ? 0 : past[past.length - 1].seen[name] - past[0].seen[name];
const steps = of => past.slice(1).map((one, place) => of(one.seen, past[place].seen, (one.now - past[place].now) / 1e3));

const waited = [], filled = [];
const keep = (values, value) => { values.push(value); values.splice(0, values.length - 60); };

function tiles(rows) {
  const holder = at('tiles');
  rows.forEach(([name, value, more, line, top], place) => {
    let tile = holder.children[place];
    if (!tile) {
      tile = make('div', 'tile');
      tile.append(make('span', 'quiet'), make('b'), make('span', 'quiet'), make('canvas'));
      holder.append(tile);
    }
    put(tile.children[0], name);
    put(tile.children[1], value);
    put(tile.children[2], more);
    draw(tile.children[3], line, top);
  });
  while (holder.children.length > rows.length) holder.lastChild.remove();
}
function draw(canvas, values, top) {
  const sharp = window.devicePixelRatio || 1;
  const width = Math.round(canvas.clientWidth * sharp), height = Math.round(canvas.clientHeight * sharp);
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  const pen = canvas.getContext('2d');
  pen.clearRect(0, 0, width, height);
  const style = getComputedStyle(document.documentElement), most = top || Math.max(...values.filter(isFinite), 1e-9);
  pen.strokeStyle = style.getPropertyValue('--line');
  pen.lineWidth = sharp;
  pen.beginPath();
  pen.moveTo(0, height - sharp / 2);
  pen.lineTo(width, height - sharp / 2);
  pen.stroke();
  pen.strokeStyle = style.getPropertyValue('--bar');
  pen.lineWidth = 1.5 * sharp;
  pen.lineJoin = 'round';
  pen.beginPath();
  let began = false;
  values.forEach((value, place) => {
    if (value === null || !isFinite(value)) return;
    const x = width - (values.length - 1 - place) * width / 59;
    const y = height - sharp - value / most * (height - 3 * sharp);
    if (began) pen.lineTo(x, y); else pen.moveTo(x, y);
    began = true;
  });
  pen.stroke();
}

// Slots.
let map = null, pointed = null;
const hue = place => Math.round(place * 137.508) % 360;
const color = place => `hsl(${hue(place)} 55% ${place % 2 ? 45 : 58}%)`;
function rgb(place) {
  const light = place % 2 ? 0.45 : 0.58, wide = 0.55 * Math.min(light, 1 - light);
  return [0, 8, 4].map(step => {
    const turn = (step + hue(place) / 30) % 12;
    return Math.round(255 * (light - wide * Math.max(-1, Math.min(turn - 3, 9 - turn, 1))));
  });
}
function paint() {
  if (!map) return;
  const pen = at('slots').getContext('2d'), image = pen.createImageData(256, 64);
  const colors = map.owners.map((_, place) => rgb(place));
  map.slots.forEach((owner, slot) => {
    const [red, green, blue] = owner === null ? [128, 128, 128] : colors[owner];
    const clear = owner === null ? 60 : pointed === null || pointed === owner ? 255 : 40;
    image.data.set([red, green, blue, clear], slot * 4);
  });
  pen.putImageData(image, 0, 0);
}
function point(owner) {
  pointed = owner;
  paint();
}
at('slots').onmousemove = event => {
  const box = at('slots').getBoundingClientRect();
  const x = Math.floor((event.clientX - box.left) / box.width * 256);
  const y = Math.floor((event.clientY - box.top) / box.height * 64);
  if (!map || x < 0 || x > 255 || y < 0 || y > 63) return;
  const slot = y * 256 + x, owner = map.slots[slot];
  const whose = owner === null ? 'no owner' : `node ${map.owners[owner][0]}, shard ${map.owners[owner][1]}`;
  put(at('slot'), `Slot ${whole(slot)}: ${whose}`);
  point(owner);
};
at('slots').onmouseleave = () => {
  put(at('slot'), 'Point at a slot or at a shard.');
  point(null);
};

const model = row => (row.tenant ? row.tenant + ' / ' : '') + row.model;
const progress = of => !of ? ''
  : of.unconfirmed ? `Its publisher has not confirmed the snapshot yet, at batch ${whole(of.next)}.`
  : of.newest > of.next ? `${whole(of.next)} of ${whole(of.newest)} batches are applied.`
  : 'Its earlier blocks are not known.';
const badges = row => row.suspect ? { text: 'suspect', kind: 'bad', title: 'The instance missed load reports and is not chosen.' }
  : row.degraded ? { text: 'degraded', kind: 'warn', title: 'The index of its cache is incomplete. ' + progress(row.progress) }
  : { text: 'ok', kind: 'good' };

function conductor(state) {
  const models = state ? state.models : [], instances = state ? state.instances : [];
  show('models', [
    { head: 'Model', kind: 'name', cell: model },
    { head: 'Tokens per block', kind: 'number', cell: row => whole(row.block_tokens) },
    { head: 'Instances', kind: 'number', cell: row => whole(row.instances) },
    { head: 'Waiting', kind: 'number', cell: row => whole(row.waiting) },
    { head: 'Booked', kind: 'number', cell: row => whole(row.requests - row.waiting) },
    { head: 'Tokens reused', kind: 'number', cell: row => {
      const part = ratio(row.reused_tokens, row.tokens);
      return { text: percent(part), part: part || 0, title: whole(row.reused_tokens) + ' of ' + whole(row.tokens) };
    } },
    { head: 'Blocks in index', kind: 'number', cell: row => ({
      text: many(row.blocks),
      title: row.forgotten_blocks ? whole(row.forgotten_blocks) + ' were dropped because the index was full' : '',
    }) },
    { head: 'Prefill error', kind: 'number', cell: row => row.error_permille ? percent(row.error_permille / 1e3) : '–' },
    { head: 'Decode step', kind: 'number', cell: row => ({
      text: (row.decode.base_ns / 1e6).toFixed(1) + ' ms',
      title: 'and ' + (row.decode.token_ps / 1e3).toFixed(0) + ' ns for each resident token'
        + (row.decode.reports ? '; error ' + percent(row.decode.error_permille / 1e3) : '; the initial constants'),
    }) },
    { head: 'Output p50, p90', kind: 'number', cell: row => row.decode.output_p90
      ? whole(row.decode.output_p50) + ', ' + whole(row.decode.output_p90) : '–' },
    { head: 'Hashes', cell: row => row.mismatch
      ? { text: 'do not match', kind: 'bad', title: 'Engines and schedulers hash with different seeds, block sizes or algorithms.' }
      : { text: 'match', kind: 'good' } },
  ], models, row => JSON.stringify([row.tenant, row.model, row.block_tokens]),
  state ? 'No instance has registered yet, so no model is served.'
    : 'This control plane hosts no Conductor: start it with --conductor.');
  for (const id of ['h-instances', 'h-hot']) at(id).parentNode.hidden = !state;
  const longest = Math.max(1e9, ...instances.map(row => row.wait_ns));
  put(at('count-instances'), instances.length ? whole(instances.length) : '');
  show('instances', [
    { head: 'Instance', kind: 'name', cell: row => row.instance },
    { head: 'State', cell: badges },
    { head: 'Part', cell: row => row.part },
    { head: 'Model', kind: 'name', cell: model },
    { head: 'Booked for', kind: 'number', cell: row => row.part === 'decode'
      ? { text: '–', part: null } : { text: row.wait_ns ? span(row.wait_ns) : 'free', part: row.wait_ns / longest } },
    { head: 'Prefills', kind: 'number', cell: row => row.part === 'decode' ? '–' : whole(row.prefills) },
    { head: 'Decodes', kind: 'number', cell: row => row.part === 'prefill' ? '–' : whole(row.decodes) },
    { head: 'Resident tokens', kind: 'number', cell: row => row.part === 'prefill' ? '–' : whole(row.decode_tokens) },
    { head: 'Last message', kind: 'number', cell: row => span(row.silent_ns) + ' ago' },
    { head: 'Address', kind: 'name code', cell: row => row.address || '–' },
  ], instances, row => row.instance, 'No instance has registered yet.');
  show('hot', [
    { head: 'Last block', kind: 'code', cell: row => row.hash },
    { head: 'Model', kind: 'name', cell: model },
    { head: 'Tokens', kind: 'number', cell: row => whole(row.tokens) },
    { head: 'Reuses per minute', kind: 'number', cell: row => few(row.per_minute) },
    { head: 'Instances holding it', kind: 'number', cell: row => whole(row.holders) },
    { head: 'In the store', cell: row => row.copied ? 'yes, replicated' : row.stored ? 'yes' : 'no' },
  ], state ? state.hot : [], row => JSON.stringify([row.tenant, row.model, row.hash]),
  'No prompt prefix was reused recently.');
}

const hit = seen => ratio(seen.hits, seen.hits + seen.misses);

function store(seen) {
  const counts = new Map();
  if (map) for (const owner of map.slots) if (owner !== null) counts.set(owner, (counts.get(owner) || 0) + 1);
  const places = new Map(map ? map.owners.map(([node, shard], place) => [node + '/' + shard, place]) : []);
  const rows = seen.members.flatMap(member => (member.shards.length ? member.shards : [null]).map(shard => {
    const place = shard ? places.get(member.node + '/' + shard.shard) : undefined;
    return { member, shard, owner_place: place, slots: place === undefined ? 0 : counts.get(place) || 0 };
  }));
  const nodes = seen.members.length;
  put(at('count-shards'), nodes ? `${whole(rows.length)} of ${whole(nodes)} node${nodes === 1 ? '' : 's'}` : '');
  const known = of => row => row.shard ? of(row.shard) : '–';
  const states = { active: 'good', suspect: 'bad', joining: 'warn', draining: 'warn' };
  show('shards', [
    { head: 'Slots', kind: 'number', cell: row => row.owner_place === undefined
      ? { text: '–', swatch: 'transparent' } : { text: whole(row.slots), swatch: color(row.owner_place) } },
    { head: 'Node', kind: 'code', cell: row => row.member.node },
    { head: 'Shard', kind: 'number', cell: known(shard => shard.shard) },
    { head: 'State', cell: row => ({ text: row.member.state, kind: states[row.member.state] || '' }) },
    { head: 'Host', kind: 'name', cell: row => row.member.host },
    { head: 'Memory', kind: 'number', cell: row => row.shard ? {
      text: bytes(row.shard.used_bytes) + ' of ' + bytes(row.shard.pool_bytes),
      part: ratio(row.shard.used_bytes, row.shard.pool_bytes) || 0,
    } : { text: '–', part: null } },
    { head: 'Objects', kind: 'number', cell: known(shard => many(shard.objects)) },
    { head: 'Hit rate of gets', kind: 'number', cell: known(shard => percent(hit(shard))) },
    { head: 'Puts', kind: 'number', cell: known(shard => many(shard.puts)) },
    { head: 'Evicted', kind: 'number', cell: known(shard => many(shard.evictions)) },
    { head: 'Connections', kind: 'number', cell: known(shard => whole(shard.connections)) },
    { head: 'Address', kind: 'code', cell: known(shard => shard.address) },
  ], rows, row => row.member.node + '/' + (row.shard ? row.shard.shard : ''), 'No storage node has joined yet.');
  const owned = map && map.owners.length > 0;
  at('map').hidden = !owned;
  at('no-slots').hidden = !!owned;
  put(at('no-slots'), 'No node owns slots.');
  put(at('about-slots'), owned ? `${whole(map.slots.length)}, by owner in epoch ${whole(map.epoch)}` : '');
  const extra = seen.more_segments ? ` and ${whole(seen.more_segments)} more` : '';
  put(at('count-segments'), seen.segments.length ? whole(seen.segments.length) + extra : '');
  show('segments', [
    { head: 'Segment', kind: 'name', cell: row => row.name },
    { head: 'Kind', cell: row => row.kind },
    { head: 'Owner', kind: 'code', cell: row => row.owner + ' ' + row.of },
    { head: 'Used', kind: 'number', cell: row => row.owner === 'node' && row.kind === 'memory'
      ? { text: bytes(row.used_bytes), part: ratio(row.used_bytes, row.bytes) || 0 } : { text: '–', part: null } },
    { head: 'Size', kind: 'number', cell: row => bytes(row.bytes) },
    { head: 'Address', kind: 'code', cell: row => row.address },
  ], seen.segments, row => JSON.stringify([row.name, row.owner, row.of]), 'No segment is registered.');
}

function render(seen) {
  if (seen.slots) {
    map = seen.slots;
    pointed = null;
    paint();
  }
  document.title = seen.cluster + ' · kvplane';
  put(at('cluster'), seen.cluster);
  put(at('about'), `epoch ${whole(seen.epoch)} · up ${span(seen.uptime_ns)} · ${seen.software}`);
  const shards = seen.members.flatMap(member => member.shards), state = seen.conductor;
  const models = state ? state.models : [];
  remember(performance.now(), {
    placed: state ? state.counts.placed : 0,
    tokens: sum(models, row => row.tokens), reused: sum(models, row => row.reused_tokens),
    hits: sum(shards, shard => shard.hits), misses: sum(shards, shard => shard.misses),
    moved: sum(shards, shard => shard.get_bytes + shard.put_bytes),
  });
  const last = past[past.length - 1], seconds = (last.now - past[0].now) / 1e3;
  const speed = name => seconds ? grown(name) / seconds : null;
  const used = sum(shards, shard => shard.used_bytes), pool = sum(shards, shard => shard.pool_bytes);
  const rows = [];
  if (state) {
    const waiting = sum(models, row => row.waiting), under = sum(models, row => row.requests) - waiting;
    keep(waited, waiting);
    rows.push(
      ['Requests placed', few(speed('placed')) + ' /s', whole(state.counts.placed) + ' in all',
        steps((one, before, took) => (one.placed - before.placed) / took)],
      ['Prompt tokens reused', percent(ratio(grown('reused'), grown('tokens'))),
        percent(ratio(last.seen.reused, last.seen.tokens)) + ' in all',
        steps((one, before) => ratio(one.reused - before.reused, one.tokens - before.tokens)), 1],
      ['Waiting', whole(waiting), `${whole(under)} booked · ${whole(state.counts.refused)} refused`, waited],
    );
  }
  const asked = (one, before) => one.hits + one.misses - before.hits - before.misses;
  keep(filled, ratio(used, pool));
  rows.push(
    ['Hit rate of gets', percent(ratio(grown('hits'), grown('hits') + grown('misses'))), percent(hit(last.seen)) + ' in all',
      steps((one, before) => ratio(one.hits - before.hits, asked(one, before))), 1],
    ['Store throughput', seconds ? bytes(speed('moved')) + '/s' : '–', bytes(last.seen.moved) + ' in all',
      steps((one, before, took) => (one.moved - before.moved) / took)],
    ['Memory', bytes(used), 'of ' + bytes(pool), filled, 1],
  );
  tiles(rows);
  conductor(state);
  store(seen);
}

let token = sessionStorage.getItem('token') || '', answered = performance.now(), timer = 0, times = 0;
function trouble(what) {
  at('trouble').hidden = !what;
  put(at('trouble'), what);
  at('dot').className = what ? 'dot bad' : 'dot good';
}
async function look() {
  clearTimeout(timer);
  if (document.hidden) return;
  const turn = times += 1;
  try {
    const headers = token ? { Authorization: 'Bearer ' + token } : {};
    const path = 'status.json' + (map ? '?map=' + map.epoch : '');
    const answer = await fetch(path, { headers, cache: 'no-store', signal: AbortSignal.timeout(5000) });
    if (turn !== times) return;
    const ask = answer.status === 401;
    at('ask').hidden = !ask;
    at('main').hidden = ask;
    if (ask) {
      trouble(token ? 'The token is wrong.' : '');
      at('dot').className = 'dot';
      return;
    }
    if (!answer.ok) throw new Error((await answer.text()).trim() || 'status ' + answer.status);
    const seen = await answer.json();
    if (turn !== times) return;
    answered = performance.now();
    render(seen);
    trouble('');
  } catch (error) {
    if (turn !== times) return;
    const since = Math.round((performance.now() - answered) / 1e3);
    trouble(`No answer for ${since} s; the data below is out of date. (${error.message})`);
  }
  timer = setTimeout(look, 1000);
}
at('ask').onsubmit = event => {
  event.preventDefault();
  token = at('token').value.trim();
  sessionStorage.setItem('token', token);
  look();
};
document.addEventListener('visibilitychange', look);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', paint);
look();
