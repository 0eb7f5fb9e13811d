/* Two processes, each with an engine of TENT's interface: one writes and reads the memory of the other, which verifies
 * it, notifies it, and makes calls that must be refused. Argument: tcp or shm, the transport between the two. Prints one
 * line for each check; the exit status is the number of failed checks. */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tent/transfer_engine.h"

_Static_assert(sizeof(tent_request_t) == 48 && offsetof(struct tent_request, transport_hint) == 44, "requests");
_Static_assert(sizeof(tent_status_t) == 16 && offsetof(struct tent_status, transferred_bytes) == 8, "statuses");
_Static_assert(sizeof(struct tent_buffer_info) == 80 && offsetof(struct tent_buffer_info, location) == 16, "buffers");
_Static_assert(sizeof(tent_segment_info_t) == 16 && offsetof(struct tent_segment_info, buffers) == 8, "segments");
_Static_assert(sizeof(tent_notifi_record_t) == 4360 && offsetof(struct tent_notifi_record, msg) == 264, "records");
_Static_assert(sizeof(tent_notifi_info) == 16 && offsetof(struct tent_notifi_info, records) == 8, "notifications");
_Static_assert(sizeof(tent_memory_options_t) == 344 && offsetof(struct tent_memory_options, shm_path) == 72 &&
                   offsetof(struct tent_memory_options, shm_offset) == 328,
               "options");
_Static_assert(sizeof(tent_nic_load_stat_t) == 80 && offsetof(struct tent_nic_load_stat, inflight_bytes) == 64, "loads");

enum { WORDS = 1 << 18, BYTES = WORDS * 8, COUNT = 64, BLOCK = 4096 };

static int failures;
static const char *side = "";

static void check(int holds, const char *what) {
    printf("%s: %s%s\n", holds ? "ok" : "FAILED", side, what);
    fflush(stdout);
    failures += !holds;
}

/* A word derived from its position. */
static uint64_t word_at(uint64_t seed, uint64_t index) {
    uint64_t x = (index + 1) * 0x9e3779b97f4a7c15ull ^ seed;
    return (x ^ x >> 29) * 0xbf58476d1ce4e5b9ull;
}

static void fill(uint64_t *words, size_t first, size_t count, uint64_t seed) {
    for (size_t i = first; i < first + count; i++) words[i] = word_at(seed, i);
}

static int matches(const uint64_t *words, size_t first, size_t count, uint64_t seed) {
    for (size_t i = first; i < first + count; i++)
        if (words[i] != word_at(seed, i)) return 0;
    return 1;
}

static tent_engine_t create(const char *way) {
    int tcp = strcmp(way, "tcp") == 0;
    tent_set_config("metadata_type", "p2p");
    tent_set_config("rpc_server_hostname", "127.0.0.1");
    tent_set_config("transports/tcp/enable", tcp ? "true" : "false");
    tent_set_config("transports/shm/enable", tcp ? "False" : "true");
    tent_set_config("transports/rdma/enable", "false");
    tent_set_config("transports/io_uring/enable", "true");
    tent_set_config("log_level", "warning");
    return tent_create_engine();
}

/* ---- the process whose memory is used ------------------------------------------------------------------------------ */

/* What it tells of itself. */
struct place {
    char name[128];
    uint64_t memory, read_only, hidden;
};

/* Request of the other process: verify or fill a range of words, receive notifications, or end. */
struct order {
    char what;
    uint64_t seed, first, count;
};

static int receive(tent_engine_t engine, uint64_t wanted, uint64_t seed) {
    uint64_t seen = 0;
    int right = 1;
    while (seen < wanted) {
        tent_notifi_info info;
        if (tent_recv_notifs(engine, &info) != 0) return 0;
        for (int i = 0; i < info.num_records; i++, seen++) {
            char text[64];
            snprintf(text, sizeof text, "{\"number\":%d}", (int)(seed + seen));
            right &= info.records[i].handle == 0 && strcmp(info.records[i].name, "request") == 0;
            right &= strcmp(info.records[i].msg, text) == 0;
        }
        tent_free_notifs(&info);
        right &= info.records == NULL && info.num_records == 0;
        tent_free_notifs(&info);
        usleep(1000);
    }
    return right && seen == wanted;
}

static int owner(const char *way, int in, int out) {
    side = "owner: ";
    tent_engine_t engine = create(way);
    check(tent_available(engine) == 1, "an engine");
    struct place place = {0};
    void *memory = NULL, *hidden = NULL, *read_only = NULL;
    check(tent_allocate_memory(engine, &memory, BYTES, "cpu:0") == 0, "memory of node 0");
    tent_memory_options_t options = {.permission = PERM_GLOBAL_READ_ONLY};
    check(tent_allocate_memory_ex(engine, &read_only, BYTES, &options) == 0, "memory with options");
    check(tent_allocate_memory(engine, &hidden, BYTES, "*") == 0, "memory of any node");
    check(tent_register_memory(engine, memory, BYTES) == 0, "it is registered");
    check(tent_register_memory_ex(engine, read_only, BYTES, &options) == 0, "read-only for peers");
    check(tent_register_memory_with_perm(engine, hidden, BYTES, PERM_LOCAL_READ_WRITE) == 0, "hidden from peers");
    fill(read_only, 0, WORDS, 77);
    check(tent_segment_name(engine, place.name, sizeof place.name) == 0, "its name");
    place.memory = (uint64_t)(uintptr_t)memory;
    place.read_only = (uint64_t)(uintptr_t)read_only;
    place.hidden = (uint64_t)(uintptr_t)hidden;
    if (write(out, &place, sizeof place) != sizeof place) return 100;
    struct order order;
    while (read(in, &order, sizeof order) == sizeof order && order.what != 'q') {
        char answer = 1;
        if (order.what == 'v') answer = (char)matches(memory, order.first, order.count, order.seed);
        if (order.what == 'f') fill(memory, order.first, order.count, order.seed);
        if (order.what == 'n') answer = (char)receive(engine, order.count, order.seed);
        if (write(out, &answer, 1) != 1) return 100;
    }
    check(matches(read_only, 0, WORDS, 77), "what is read-only was not written");
    check(tent_unregister_memory(engine, memory, BYTES) == 0 && tent_free_memory(engine, memory) == 0, "memory is freed");
    check(tent_free_memory(engine, memory) == -1, "once");
    check(tent_free_memory(engine, hidden) == 0, "registered memory is unregistered and freed");
    check(tent_unregister_memory(engine, hidden, 0) == -1, "so it is not registered any more");
    tent_destroy_engine(engine);
    return failures;
}

/* ---- the process that uses it -------------------------------------------------------------------------------------- */

static int to_owner, from_owner;

static int ask(char what, uint64_t seed, uint64_t first, uint64_t count) {
    struct order order;
    char answer = 0;
    memset(&order, 0, sizeof order); /* The padding is sent, too. */
    order.what = what, order.seed = seed, order.first = first, order.count = count;
    if (write(to_owner, &order, sizeof order) != sizeof order || read(from_owner, &answer, 1) != 1) return 0;
    return answer;
}

/* Opens the owner's segment, which may take its time to answer on a busy machine. */
static tent_segment_id_t owners_segment(tent_engine_t engine, const char *name) {
    tent_segment_id_t segment = LOCAL_SEGMENT_ID;
    for (int tries = 0; tries < 10 && tent_open_segment(engine, &segment, name) != 0; tries++) continue;
    return segment;
}

static int wait_for(tent_engine_t engine, tent_batch_id_t batch) {
    tent_status_t status = {STATUS_PENDING, 0};
    while (status.status == STATUS_PENDING)
        if (tent_overall_status(engine, batch, &status) != 0) return -1;
    return status.status;
}

/* Moves one range; returns its state, or -1 when it is refused. */
static int one(tent_engine_t engine, tent_request_t request) {
    tent_batch_id_t batch = tent_allocate_batch(engine, 1);
    int state = tent_submit(engine, batch, &request, 1) == 0 ? wait_for(engine, batch) : -1;
    check(tent_free_batch(engine, batch) == 0, "a batch is freed");
    return state;
}

static void moves_bytes(tent_engine_t engine, tent_segment_id_t segment, struct place *place, uint64_t *words) {
    fill(words, 0, WORDS, 1);
    tent_request_t all = {OPCODE_WRITE, words, segment, place->memory, BYTES, 0, 0};
    check(one(engine, all) == STATUS_COMPLETED && ask('v', 1, 0, WORDS), "a write of all memory arrives");
    ask('f', 2, 0, WORDS);
    tent_request_t part = {OPCODE_READ, words + 7, segment, place->memory + 7 * 8, 800, 2, 0};
    check(one(engine, part) == STATUS_COMPLETED && matches(words, 7, 100, 2) && matches(words, 107, 1000, 1) &&
              matches(words, 0, 7, 1),
          "a read brings its range and nothing beside it");
    tent_request_t guarded = {OPCODE_READ, words, segment, place->read_only, BYTES, 1, 0};
    check(one(engine, guarded) == STATUS_COMPLETED && matches(words, 0, WORDS, 77), "read-only memory is read");
    guarded.opcode = OPCODE_WRITE;
    check(one(engine, guarded) != STATUS_COMPLETED, "and not written");
    tent_request_t hidden = {OPCODE_READ, words, segment, place->hidden, 8, 0, 0};
    check(one(engine, hidden) != STATUS_COMPLETED, "hidden memory is not read");
    tent_request_t empty = {OPCODE_READ, words, segment, place->memory, 0, 0, 0};
    check(one(engine, empty) == STATUS_COMPLETED, "a transfer of no bytes completes");
    tent_request_t local = {OPCODE_WRITE, words, LOCAL_SEGMENT_ID, (uint64_t)(uintptr_t)(words + WORDS / 2), 4096, 0, 0};
    fill(words, 0, WORDS, 5);
    check(one(engine, local) == STATUS_COMPLETED && memcmp(words, words + WORDS / 2, 4096) == 0, "a copy within memory");
}

static void batches(tent_engine_t engine, tent_segment_id_t segment, struct place *place, uint64_t *words) {
    tent_request_t requests[COUNT];
    tent_status_t statuses[COUNT], status;
    size_t count = COUNT / 2;
    fill(words, 0, WORDS, 3);
    for (size_t i = 0; i < COUNT; i++)
        requests[i] = (tent_request_t){OPCODE_WRITE, (char *)words + i * 2 * BLOCK, segment, place->memory + i * 2 * BLOCK,
                                       BLOCK, (int)(i % 3), 0};
    ask('f', 4, 0, WORDS);
    tent_batch_id_t batch = tent_allocate_batch(engine, COUNT);
    check(batch != 0 && batch != UINT64_MAX, "a batch");
    check(tent_overall_status(engine, batch, &status) == 0 && status.status == STATUS_COMPLETED, "complete when empty");
    check(tent_submit(engine, batch, requests, COUNT / 2) == 0 &&
              tent_submit(engine, batch, requests + COUNT / 2, COUNT / 2) == 0,
          "it takes its transfers in two parts");
    check(tent_submit(engine, batch, requests, 1) == -1, "and no more");
    check(wait_for(engine, batch) == STATUS_COMPLETED, "all of them complete");
    check(tent_overall_status(engine, batch, &status) == 0 && status.transferred_bytes == COUNT * BLOCK, "all bytes");
    check(tent_task_status_list(engine, batch, statuses, &count) == 0 && count == COUNT, "the number of tasks");
    int right = 1;
    for (size_t i = 0; i < COUNT; i++) {
        right &= tent_task_status(engine, batch, i, &status) == 0 && status.status == STATUS_COMPLETED;
        right &= status.transferred_bytes == BLOCK && (i >= COUNT / 2 || statuses[i].status == STATUS_COMPLETED);
        right &= ask('v', 3, i * 2 * BLOCK / 8, BLOCK / 8) && ask('v', 4, (i * 2 + 1) * BLOCK / 8, BLOCK / 8);
    }
    check(right, "each block is in its place, and nothing beside it");
    check(tent_task_status(engine, batch, COUNT, &status) == -1, "no task beyond the last");
    check(tent_cancel_task(engine, batch, 0) == 0 && tent_cancel_task(engine, batch, COUNT) == -1, "no task to cancel");
    check(tent_task_status(engine, batch, 0, &status) == 0 && status.status == STATUS_COMPLETED, "what ended stays");
    check(tent_free_batch(engine, batch) == 0, "the batch is freed");
    check(tent_free_batch(engine, batch) == -1 && tent_overall_status(engine, batch, &status) == -1 &&
              tent_task_status(engine, batch, 0, &status) == -1 && tent_submit(engine, batch, requests, 1) == -1 &&
              tent_task_status_list(engine, batch, statuses, &count) == -1 && tent_cancel_task(engine, batch, 0) == -1,
          "a freed batch is an error");
    check(tent_allocate_batch(engine, (size_t)-1) == 0, "no batch without a limit");
}

static void notifications(tent_engine_t engine, tent_segment_id_t segment, struct place *place, uint64_t *words) {
    static char longest[4096 + 1];
    check(tent_send_notifs(engine, segment, "request", "{\"number\":20}") == 0, "a notification is sent");
    tent_request_t requests[2] = {{OPCODE_WRITE, words, segment, place->memory, 4096, 0, 0},
                                  {OPCODE_WRITE, words, LOCAL_SEGMENT_ID, (uint64_t)(uintptr_t)(words + 8192), 8, 0, 0}};
    tent_batch_id_t batch = tent_allocate_batch(engine, 2);
    check(tent_submit_notif(engine, batch, requests, 2, "request", "{\"number\":21}") == 0, "transfers with one");
    check(wait_for(engine, batch) == STATUS_COMPLETED && tent_free_batch(engine, batch) == 0, "complete");
    check(ask('n', 20, 0, 2), "both arrive, in order, once");
    check(receive(engine, 1, 21), "the other segment's owner gets it, too");
    memset(longest, 'x', sizeof longest - 1);
    check(tent_send_notifs(engine, segment, "request", longest) == -1, "a text that no record has room for");
    longest[4095] = 0;
    check(tent_send_notifs(engine, LOCAL_SEGMENT_ID, "request", longest) == 0, "the longest text");
    check(tent_send_notifs(engine, LOCAL_SEGMENT_ID, longest, "m") == -1, "a name that is too long");
    check(tent_send_notifs(engine, LOCAL_SEGMENT_ID, "\xff", "m") == -1, "a name that is not UTF-8");
    tent_notifi_info info = {0, NULL};
    while (info.num_records == 0 && tent_recv_notifs(engine, &info) == 0) usleep(1000);
    check(info.num_records == 1 && strcmp(info.records[0].msg, longest) == 0, "is received whole");
    tent_notifi_info again = info;
    tent_free_notifs(&info);
    tent_free_notifs(&again);
    check(tent_recv_notifs(engine, &info) == 0 && info.num_records == 0 && info.records == NULL, "nothing else");
}

/* A process that is stopped answers nothing: transfers to it stay in flight. */
static void cancels(tent_engine_t engine, tent_segment_id_t segment, struct place *place, uint64_t *words, pid_t peer) {
    tent_request_t requests[2] = {{OPCODE_READ, words, segment, place->memory, BYTES / 2, 0, TRANSPORT_TCP},
                                  {OPCODE_READ, words + WORDS / 2, segment, place->memory, BYTES / 2, 0, 0}};
    tent_status_t status;
    int how;
    kill(peer, SIGSTOP);
    check(waitpid(peer, &how, WUNTRACED) == peer && WIFSTOPPED(how), "the owner is stopped");
    tent_batch_id_t single = tent_allocate_batch(engine, 1);
    check(tent_submit(engine, single, requests, 1) == 0, "a read");
    check(tent_task_status(engine, single, 0, &status) == 0 && status.status == STATUS_PENDING, "it is in flight");
    check(tent_cancel_task(engine, single, 0) == 0, "it is cancelled");
    check(wait_for(engine, single) == STATUS_CANCELED, "and ends so");
    check(tent_task_status(engine, single, 0, &status) == 0 && status.status == STATUS_CANCELED, "its task, too");
    check(tent_free_batch(engine, single) == 0, "it is freed");
    tent_batch_id_t pair = tent_allocate_batch(engine, 3);
    check(tent_submit(engine, pair, requests, 2) == 0, "two reads");
    check(tent_overall_status(engine, pair, &status) == 0 && status.status == STATUS_PENDING, "they are in flight");
    check(tent_cancel_task(engine, pair, 0) == -1, "one of two is not cancelled alone");
    check(tent_free_batch(engine, pair) == 0 && tent_free_batch(engine, pair) == 0, "a batch in flight is freed later");
    check(tent_task_status(engine, pair, 1, &status) == 0 && status.status == STATUS_PENDING, "its status is known");
    check(tent_submit(engine, pair, requests, 1) == -1, "but it takes no transfers");
    kill(peer, SIGCONT);
    check(wait_for(engine, pair) == STATUS_COMPLETED, "they complete when the owner goes on");
    check(tent_free_batch(engine, tent_allocate_batch(engine, 1)) == 0, "another batch");
    check(tent_overall_status(engine, pair, &status) == -1, "and the freed one is gone");
    check(ask('f', 6, 0, WORDS), "the owner goes on");
    requests[0].length = BYTES;
    check(one(engine, requests[0]) == STATUS_COMPLETED && matches(words, 0, WORDS, 6), "a read completes again");
}

static void memory(tent_engine_t engine) {
    static char ranges[4][4096];
    void *addresses[3] = {ranges[0], ranges[1], ranges[2]}, *allocated = NULL;
    size_t sizes[3] = {4096, 4096, 4096}, wrong[3] = {4096, 4096, 8};
    check(tent_register_memory_batch(engine, addresses, sizes, 3, PERM_GLOBAL_READ_WRITE) == 0, "three ranges");
    check(tent_register_memory(engine, ranges[1], 4096) == 0, "one of them again");
    check(tent_register_memory_with_perm(engine, ranges[1], 4096, PERM_GLOBAL_READ_ONLY) == -1, "not otherwise");
    check(tent_register_memory(engine, ranges[0] + 100, 4096) == -1, "no overlap");
    addresses[2] = ranges[3], addresses[1] = ranges[0] + 8;
    check(tent_register_memory_batch(engine, addresses, sizes, 3, PERM_GLOBAL_READ_WRITE) == -1, "none of a wrong batch");
    check(tent_register_memory(engine, ranges[3], 4096) == 0, "so the others are free");
    check(tent_unregister_memory(engine, ranges[3], 4095) == -1 && tent_unregister_memory(engine, ranges[3], 0) == 0,
          "the length is that of the registration, or 0");
    addresses[1] = ranges[1], addresses[2] = ranges[2];
    check(tent_unregister_memory_batch(engine, addresses, wrong, 3) == -1, "none of a wrong batch is unregistered");
    check(tent_unregister_memory_batch(engine, addresses, NULL, 3) == 0, "all of a right one are");
    check(tent_unregister_memory_batch(engine, addresses, sizes, 3) == -1, "two of them only once");
    check(tent_unregister_memory(engine, ranges[1], 4096) == 0, "the one that was registered twice, twice");
    check(tent_unregister_memory(engine, ranges[1], 4096) == -1, "not more");
    tent_memory_options_t options = {.permission = PERM_GLOBAL_READ_WRITE, .location = "cpu:0"};
    check(tent_register_memory_batch_ex(engine, addresses, sizes, 3, &options) == 0, "three ranges with options");
    check(tent_unregister_memory_batch(engine, addresses, sizes, 3) == 0, "they are unregistered");
    check(tent_register_memory(engine, NULL, 8) == -1 && tent_register_memory(engine, ranges[0], 0) == -1 &&
              tent_register_memory(engine, ranges[0], (size_t)-1) == -1,
          "no memory at 0, of no bytes, or of more than there are");
    check(tent_register_memory_with_perm(engine, ranges[0], 8, 3) == -1, "no other permission");
    check(tent_allocate_memory(engine, &allocated, 0, "*") == -1 &&
              tent_allocate_memory(engine, &allocated, (size_t)-1, "*") == -1 &&
              tent_allocate_memory(engine, &allocated, 4096, "cpu:4095") == -1 &&
              tent_allocate_memory(engine, &allocated, 4096, "moon:0") == -1 &&
              tent_allocate_memory(engine, &allocated, 4096, "cuda:4095") == -1 && allocated == NULL,
          "no memory of no bytes, of too many, of no node, and of no device");
    check(tent_free_memory(engine, ranges[0]) == -1, "only allocated memory is freed");
    check(tent_allocate_memory(engine, &allocated, 100000, "*") == 0, "memory");
    check(tent_register_memory(engine, (char *)allocated + 4096, 4096) == 0, "a part of it is registered");
    check(tent_free_memory(engine, allocated) == 0, "it is freed with its part");
    memset(options.location, 'x', sizeof options.location);
    check(tent_register_memory_ex(engine, ranges[0], 4096, &options) == -1 &&
              tent_allocate_memory_ex(engine, &allocated, 4096, &options) == -1,
          "no location without an end");
    options = (tent_memory_options_t){.permission = PERM_GLOBAL_READ_WRITE, .shm_path = "mine"};
    check(tent_register_memory_ex(engine, ranges[0], 4096, &options) == -1, "no path of shared memory");
    options = (tent_memory_options_t){.permission = PERM_GLOBAL_READ_WRITE, .internal = 1};
    check(tent_register_memory_ex(engine, ranges[0], 4096, &options) == -1, "no internal memory");
    options = (tent_memory_options_t){.permission = PERM_GLOBAL_READ_WRITE, .transport_type = TRANSPORT_NVLINK};
    check(tent_register_memory_ex(engine, ranges[0], 4096, &options) == -1 &&
              tent_allocate_memory_ex(engine, &allocated, 4096, &options) == -1,
          "no memory of a transport that is not here");
}

static void refusals(tent_engine_t engine, tent_segment_id_t segment, struct place *place, uint64_t *words) {
    char text[8] = "unused", name[256];
    uint16_t port = 0;
    tent_segment_id_t handle = 0;
    tent_segment_info_t info;
    tent_status_t status;
    size_t count = 1;
    void *memory = words;
    const char *longest = memset(malloc(10000), 'n', 9999);
    ((char *)longest)[9999] = 0;
    check(tent_segment_name(engine, text, sizeof text) == -1 && strcmp(text, "unused") == 0, "no half of a name");
    check(tent_segment_name(engine, NULL, 8) == -1 && tent_segment_name(engine, text, 0) == -1, "no place for it");
    check(tent_rpc_server_addr_port(engine, text, sizeof text, &port) == -1 && port == 0, "no half of an address");
    check(tent_rpc_server_addr_port(engine, name, sizeof name, NULL) == -1, "no place for the port");
    check(tent_open_segment(engine, &handle, NULL) == -1 && tent_open_segment(engine, NULL, place->name) == -1 &&
              tent_open_segment(engine, &handle, longest) == -1,
          "a name and a place for the handle");
    check(tent_open_segment(engine, &handle, "127.0.0.1:1") == -1 && handle == 0, "no segment of nobody");
    check(tent_close_segment(engine, 12345) == -1 && tent_close_segment(engine, UINT64_MAX) == -1, "no other handles");
    check(tent_get_segment_info(engine, 12345, &info) == -1 && tent_get_segment_info(engine, segment, NULL) == -1,
          "nor descriptions");
    tent_request_t bad[] = {{2, words, segment, place->memory, 8, 0, 0},
                            {OPCODE_READ, words, 12345, place->memory, 8, 0, 0},
                            {OPCODE_READ, words, UINT64_MAX, place->memory, 8, 0, 0},
                            {OPCODE_READ, words, segment, place->memory, 8, 3, 0},
                            {OPCODE_READ, words, segment, place->memory, 8, -1, 0},
                            {OPCODE_READ, words, segment, place->memory, 8, 0, TRANSPORT_RDMA},
                            {OPCODE_READ, words, segment, place->memory, 8, 0, TRANSPORT_IOURING},
                            {OPCODE_READ, words, segment, place->memory, 8, 0, 13},
                            {OPCODE_READ, words, segment, place->memory, 8, 0, -1},
                            {OPCODE_READ, NULL, segment, place->memory, 8, 0, 0},
                            {OPCODE_READ, words, segment, place->memory + BYTES - 4, 8, 0, 0},
                            {OPCODE_READ, words, segment, UINT64_MAX - 3, 8, 0, 0},
                            {OPCODE_READ, words, segment, place->memory, UINT64_MAX, 0, 0}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        check(one(engine, bad[i]) != STATUS_COMPLETED, "a wrong request does not complete");
    tent_batch_id_t batch = tent_allocate_batch(engine, 4);
    tent_request_t two[2] = {{OPCODE_WRITE, words, segment, place->memory, 8, 0, 0}, bad[0]};
    words[0] = ~words[0];
    ask('f', 8, 0, 1);
    check(tent_submit(engine, batch, two, 2) == -1 && ask('v', 8, 0, 1), "nothing of a wrong submission is done");
    check(tent_submit(engine, batch, NULL, 1) == -1 && tent_submit(engine, batch, two, (size_t)-1) == -1 &&
              tent_submit_notif(engine, batch, two, 1, NULL, "m") == -1 &&
              tent_submit_notif(engine, batch, two, 1, "n", longest) == -1,
          "null pointers and counts");
    check(tent_task_status(engine, batch, 0, NULL) == -1 && tent_overall_status(engine, batch, NULL) == -1 &&
              tent_task_status_list(engine, batch, &status, NULL) == -1,
          "places for statuses");
    check(tent_free_batch(engine, batch) == 0 && tent_free_batch(engine, 0) == -1, "no batch 0");
    check(tent_send_notifs(engine, 12345, "n", "m") == -1 && tent_send_notifs(engine, segment, NULL, "m") == -1 &&
              tent_send_notifs(engine, segment, "n", NULL) == -1 && tent_recv_notifs(engine, NULL) == -1,
          "notifications");
    check(tent_register_memory_batch(engine, NULL, &count, 1, 2) == -1 &&
              tent_register_memory_batch(engine, &memory, NULL, 1, 2) == -1 &&
              tent_register_memory_batch(engine, &memory, &count, (size_t)-1, 2) == -1 &&
              tent_register_memory_batch_ex(engine, &memory, &count, 1, NULL) == -1 &&
              tent_unregister_memory_batch(engine, NULL, NULL, 1) == -1 &&
              tent_register_memory_ex(engine, words, 8, NULL) == -1 &&
              tent_allocate_memory(engine, NULL, 8, "*") == -1 && tent_allocate_memory(engine, &memory, 8, NULL) == -1 &&
              tent_allocate_memory_ex(engine, &memory, 8, NULL) == -1 && memory == words,
          "memory");
    check(tent_get_nic_load_stats(engine, NULL, &count) == -1, "loads");
    free((void *)longest);
}

/* Every call on an engine that is not there. */
static void no_engine(tent_engine_t engine, const char *what) {
    char text[8];
    uint16_t port;
    tent_segment_id_t handle;
    tent_segment_info_t info;
    tent_notifi_info notifications;
    tent_request_t request = {0};
    tent_memory_options_t options = {0};
    tent_nic_load_stat_t load;
    tent_status_t status;
    size_t count = 1;
    void *memory = text;
    int refused = 0;
    refused += tent_segment_name(engine, text, 8) + tent_rpc_server_addr_port(engine, text, 8, &port);
    refused += tent_open_segment(engine, &handle, "") + tent_close_segment(engine, 0);
    refused += tent_get_segment_info(engine, 0, &info) + tent_allocate_memory(engine, &memory, 8, "*");
    refused += tent_free_memory(engine, memory) + tent_register_memory(engine, memory, 8);
    refused += tent_unregister_memory(engine, memory, 8) + tent_free_batch(engine, 1);
    refused += tent_submit(engine, 1, &request, 1) + tent_submit_notif(engine, 1, &request, 1, "n", "m");
    refused += tent_send_notifs(engine, 0, "n", "m") + tent_recv_notifs(engine, &notifications);
    refused += tent_task_status(engine, 1, 0, &status) + tent_cancel_task(engine, 1, 0);
    refused += tent_overall_status(engine, 1, &status) + tent_register_memory_with_perm(engine, memory, 8, 0);
    refused += tent_register_memory_batch(engine, &memory, &count, 1, 0);
    refused += tent_unregister_memory_batch(engine, &memory, &count, 1);
    refused += tent_allocate_memory_ex(engine, &memory, 8, &options);
    refused += tent_register_memory_ex(engine, memory, 8, &options);
    refused += tent_register_memory_batch_ex(engine, &memory, &count, 1, &options);
    refused += tent_task_status_list(engine, 1, &status, &count) + tent_get_nic_load_stats(engine, &load, &count);
    check(refused == -25 && tent_available(engine) == 0 && tent_allocate_batch(engine, 1) == UINT64_MAX, what);
    tent_destroy_engine(engine);
}

static void files(tent_engine_t engine, uint64_t *words) {
    char name[128];
    tent_segment_id_t file;
    tent_segment_info_t info;
    snprintf(name, sizeof name, "file:///tmp/kvplane-tent-%d?create=%d", (int)getpid(), 65536);
    check(tent_open_segment(engine, &file, name) == 0 && file != LOCAL_SEGMENT_ID, "a file opens");
    check(tent_get_segment_info(engine, file, &info) == 0 && info.type == TYPE_FILE && info.num_buffers == 1 &&
              info.buffers[0].base == 0 && info.buffers[0].length == 65536,
          "it is described");
    tent_free_segment_info(&info);
    fill(words, 0, 4096, 9);
    tent_request_t request = {OPCODE_WRITE, words, file, 1001, 5000, 0, TRANSPORT_IOURING};
    check(one(engine, request) == STATUS_COMPLETED, "it is written");
    request.opcode = OPCODE_READ, request.source = words + 4096;
    check(one(engine, request) == STATUS_COMPLETED && memcmp(words, words + 4096, 5000) == 0, "and read");
    request.transport_hint = TRANSPORT_TCP;
    check(one(engine, request) == -1, "not over TCP");
    check(tent_send_notifs(engine, file, "n", "m") == -1, "it takes no notifications");
    check(tent_close_segment(engine, file) == 0 && tent_close_segment(engine, file) == -1, "it closes, once");
    *strchr(name, '?') = 0;
    check(remove(name + strlen("file://")) == 0, "and was where its name says");
}

static void settings(void) {
    char long_key[400];
    memset(long_key, 'k', sizeof long_key - 1);
    long_key[sizeof long_key - 1] = 0;
    tent_set_config(long_key, "1");
    check(tent_create_engine() == NULL, "no engine after a key that is too long");
    tent_set_config(NULL, "1");
    check(tent_create_engine() == NULL, "nor after none");
    tent_load_config_from_file("/no/such/file");
    check(tent_create_engine() == NULL, "nor with a file that is not there");
    char path[64];
    snprintf(path, sizeof path, "/tmp/kvplane-tent-%d.json", (int)getpid());
    FILE *file = fopen(path, "w");
    check(file != NULL && fputs("{\"topology\": {\"priority_matrix\": 5}}", file) >= 0 && fclose(file) == 0, "a file");
    tent_load_config_from_file(path);
    check(tent_create_engine() == NULL, "nor with a wrong value in it");
    file = fopen(path, "w");
    check(file != NULL && fputs("{\"topology\": {\"rdma_whitelist\": []}}", file) >= 0 && fclose(file) == 0,
          "another file");
    tent_set_config("rpc_server_port", "65536");
    check(tent_create_engine() == NULL, "nor with a port that does not exist");
    tent_set_config("rpc_server_port", "0");
    tent_engine_t engine = tent_create_engine();
    check(tent_available(engine) == 1, "an engine with a file");
    tent_destroy_engine(engine);
    tent_load_config_from_file("");
    remove(path);
}

static void segments(tent_engine_t engine, tent_segment_id_t segment, struct place *place, uint64_t *words) {
    tent_segment_info_t info, own;
    tent_segment_id_t again = 0, local = 7;
    char name[256], address[64];
    uint16_t port = 0;
    check(tent_open_segment(engine, &again, place->name) == 0 && again == segment, "an open segment opens again");
    check(tent_close_segment(engine, again) == 0, "and is closed as often");
    check(tent_segment_name(engine, name, sizeof name) == 0 && tent_open_segment(engine, &local, name) == 0 &&
              local == LOCAL_SEGMENT_ID,
          "its own name is that of the local segment");
    local = 7;
    check(tent_open_segment(engine, &local, "") == 0 && local == LOCAL_SEGMENT_ID, "so is an empty one");
    check(tent_rpc_server_addr_port(engine, address, sizeof address, &port) == 0 && strcmp(address, "127.0.0.1") == 0 &&
              strncmp(name, address, strlen(address)) == 0 && atoi(name + strlen(address) + 1) == port,
          "its address and port are those of the name");
    check(tent_get_segment_info(engine, segment, &info) == 0 && info.type == TYPE_MEMORY && info.num_buffers == 2,
          "what peers may use is described");
    int found = 0;
    for (int i = 0; i < info.num_buffers; i++)
        found += info.buffers[i].base == place->memory || info.buffers[i].base == place->read_only;
    check(found == 2 && info.buffers[0].length == BYTES, "with addresses and lengths");
    check(tent_get_segment_info(engine, LOCAL_SEGMENT_ID, &own) == 0 && own.num_buffers == 1 &&
              own.buffers[0].base == (uint64_t)(uintptr_t)words && strncmp(own.buffers[0].location, "cpu:", 4) == 0,
          "and its own memory, with its location");
    tent_segment_info_t copy = info;
    tent_free_segment_info(&info);
    tent_free_segment_info(&info);
    tent_free_segment_info(&copy);
    tent_free_segment_info(&own);
    tent_free_segment_info(NULL);
    tent_free_notifs(NULL);
    check(info.buffers == NULL && info.num_buffers == 0, "descriptions are freed once");
}

enum { LANES = 4, ROUNDS = 20, SHARE = WORDS / 2 / LANES };

struct lane {
    tent_engine_t engine;
    tent_segment_id_t segment;
    uint64_t target, *words;
    size_t first;
    int wrong;
    atomic_int rounds;
};

/* Moves a range of a lane; returns 0 when the engine is gone. */
static int moves(struct lane *lane, int opcode, uint64_t *source) {
    tent_request_t request = {opcode, source, lane->segment, lane->target + lane->first * 8, SHARE * 8, 0, 0};
    tent_status_t status = {STATUS_PENDING, 0};
    tent_batch_id_t batch = tent_allocate_batch(lane->engine, 1);
    if (batch == 0 || batch == UINT64_MAX || tent_submit(lane->engine, batch, &request, 1) != 0) return 0;
    while (status.status == STATUS_PENDING)
        if (tent_task_status(lane->engine, batch, 0, &status) != 0) return 0;
    tent_free_batch(lane->engine, batch);
    return status.status == STATUS_COMPLETED;
}

/* Writes a range and reads it back, again and again, until the engine is destroyed. */
static void *hammer(void *argument) {
    struct lane *lane = argument;
    for (uint64_t round = 0;; round++) {
        uint64_t *sent = lane->words + lane->first, *back = sent + WORDS / 2;
        fill(sent, 0, SHARE, round);
        if (!moves(lane, OPCODE_WRITE, sent) || !moves(lane, OPCODE_READ, back)) return NULL;
        lane->wrong += !matches(back, 0, SHARE, round);
        atomic_fetch_add(&lane->rounds, 1);
    }
}

static void threads(const char *way, struct place *place, uint64_t *words) {
    static struct lane lanes[LANES];
    pthread_t handles[LANES];
    tent_segment_id_t segment;
    int wrong = 0;
    tent_engine_t engine = create(way);
    check(tent_register_memory(engine, words, BYTES) == 0, "another engine for several threads");
    segment = owners_segment(engine, place->name);
    check(segment != LOCAL_SEGMENT_ID, "has the owner's segment");
    for (size_t i = 0; i < LANES; i++) {
        lanes[i] = (struct lane){.engine = engine, .segment = segment, .target = place->memory, .words = words};
        lanes[i].first = i * SHARE;
        pthread_create(&handles[i], NULL, hammer, &lanes[i]);
    }
    for (int i = 0; i < LANES; i++)
        while (atomic_load(&lanes[i].rounds) < ROUNDS) usleep(1000);
    tent_destroy_engine(engine);
    for (int i = 0; i < LANES; i++) {
        pthread_join(handles[i], NULL);
        wrong += lanes[i].wrong;
    }
    check(wrong == 0, "threads share it without a wrong word, until it is destroyed under them");
}

static int user(const char *way, pid_t peer) {
    int tcp = strcmp(way, "tcp") == 0;
    struct place place;
    if (read(from_owner, &place, sizeof place) != sizeof place) return 100;
    no_engine(NULL, "calls on a null engine");
    setenv("MC_TENT_CONF", "{\"transports\": {\"tcp\": {\"enable\": 7}}}", 1);
    check(create(way) == NULL, "no engine with a wrong value in the environment");
    setenv("MC_TENT_CONF", "{\"transports\": {\"gds\": {\"enable\": false}}}", 1);
    tent_engine_t engine = create(way);
    check(tent_available(engine) == 1, "an engine");
    uint64_t *words = aligned_alloc(4096, BYTES);
    fill(words, 0, WORDS, 0);
    tent_memory_options_t options = {.permission = PERM_LOCAL_READ_WRITE, .location = "cpu:0"};
    options.transport_type = tcp ? TRANSPORT_TCP : TRANSPORT_SHM;
    check(tent_register_memory_ex(engine, words, BYTES, &options) == 0, "memory for the only transport");
    tent_segment_id_t segment = owners_segment(engine, place.name);
    check(segment != LOCAL_SEGMENT_ID, "the owner's segment");
    if (failures) return failures;
    segments(engine, segment, &place, words);
    moves_bytes(engine, segment, &place, words);
    batches(engine, segment, &place, words);
    notifications(engine, segment, &place, words);
    memory(engine);
    refusals(engine, segment, &place, words);
    files(engine, words);
    if (tcp) cancels(engine, segment, &place, words, peer);
    tent_nic_load_stat_t loads[16];
    size_t count = 16;
    check(tent_get_nic_load_stats(engine, loads, &count) == 0 && count > 0 && loads[0].device_name[0] != 0, "loads");
    check(tent_close_segment(engine, segment) == 0 && tent_close_segment(engine, segment) == -1, "the segment closes");
    settings();
    tent_destroy_engine(engine);
    threads(way, &place, words);
    no_engine(engine, "calls on a destroyed engine");
    free(words);
    ask('q', 0, 0, 0);
    int how = -1;
    check(waitpid(peer, &how, 0) == peer && WIFEXITED(how) && WEXITSTATUS(how) == 0, "the owner's checks hold");
    return failures;
}

int main(int count, char **arguments) {
    int orders[2], answers[2];
    if (count != 2 || pipe(orders) || pipe(answers)) return 101;
    alarm(110);
    pid_t peer = fork();
    if (peer == 0) {
        alarm(110);
        close(orders[1]);
        close(answers[0]);
        return owner(arguments[1], orders[0], answers[1]);
    }
    close(orders[0]);
    close(answers[1]);
    to_owner = orders[1];
    from_owner = answers[0];
    int failed = user(arguments[1], peer);
    if (failed) kill(peer, SIGKILL);
    return failed;
}
