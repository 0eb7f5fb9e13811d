"""Command lines in the form of gflags, for Mooncake's console scripts."""

import json
import sys

TRUE = ("true", "1", "yes", "on", "t", "y")
FALSE = ("false", "0", "no", "off", "f", "n")


def end(text):
    """Prints an error in one line, and exits."""
    sys.exit(f"kvplane: {text}")


def flags(words, known, about="", name=""):
    """Parses the flags of a command line, `-name=value`, `--name value`, `--name` or `--noname`. Returns known flags by
    name, and reports the others. `--help` and `--version` print their text and exit."""
    values, others = _read(list(words), known)
    if values.pop("help", None) or values.pop("helpfull", None) or values.pop("h", None):
        print(f"{name}: {about}\n\nMooncake's flags that have an effect here:\n")
        print("\n".join(f"  --{one:<28} {text}" for one, text in sorted(known.items()) if text))
        print("\nMooncake's other flags are reported on standard error, and ignored.")
        sys.exit(0)
    if values.pop("version", None):
        from importlib.metadata import version

        from kvplane import __version__

        print(f"{name} of kvplane {__version__}, as of mooncake-transfer-engine {version('mooncake-transfer-engine')}")
        sys.exit(0)
    if others:
        said(others)
    return values


def said(others):
    """Reports the flags that are ignored, in one line."""
    print(f"kvplane: ignored, because they have no effect here: {', '.join(sorted(set(others)))}", file=sys.stderr)


_ALWAYS = ("help", "helpfull", "h", "version")


def _read(words, known):
    values, others = {}, []
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            others.append(word)
            continue
        name, found, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name in _ALWAYS:
            values[name] = "true"
            continue
        if not found and name.startswith("no") and name not in known and name[2:] in known:
            name, found, value = name[2:], "=", "false"
        if not found:
            value = words.pop(0) if words and not words[0].startswith("-") else "true"
        if name == "flagfile":
            words = _lines(value) + words
        elif name in known:
            values[name] = value
        else:
            others.append(name)
    return values, others


def _lines(path):
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        end(f"--flagfile={path} cannot be read: {error}")
    return [line for line in lines if line.startswith("-")]


def configured(path, known):
    """Returns the flags in a file, JSON or lines `name: value` (YAML without nesting)."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        values = json.loads(text) if text.lstrip().startswith("{") else _yaml(text)
    except (OSError, ValueError) as error:
        end(f"--config_path={path}: {error}")
    words = []
    for name, value in values.items():
        if isinstance(value, (dict, list)):
            end(f"--config_path={path}: {name!r} is not a single value")
        words.append(f"--{name}={str(value).lower() if isinstance(value, bool) else value}")
    found, others = _read(words, known)
    if others:
        said(others)
    return found


def _yaml(text):
    values = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split(" #")[0].rstrip()
        if not line or line.startswith(("#", "---")):
            continue
        name, found, value = line.partition(":")
        if not found or line[0].isspace():
            raise ValueError(f"line {number} is not `name: value`")
        values[name.strip()] = value.strip().strip("\"'")
    return values


def truth(name, text):
    """Parses a boolean."""
    if text.lower() not in TRUE + FALSE:
        end(f"--{name}={text} is neither true nor false")
    return text.lower() in TRUE


def port(name, text):
    """Parses a port number."""
    if not text.isdigit() or int(text) > 65535:
        end(f"--{name}={text} is not a port: give a number up to 65535")
    return int(text)
