"""What the schema of the chart "jupyterhub" says of the keys that docs/admin/k8s/values.yaml uses, recorded in a file.

The schema itself, 3,200 lines of another project, is not copied.  To record it anew from a checkout of
jupyterhub/zero-to-jupyterhub-k8s, which also validates the values against all of it:

    python tests/hub/chart_keys.py CHECKOUT
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

VALUES = Path(__file__).resolve().parents[2] / "docs/admin/k8s/values.yaml"
RECORD = Path(__file__).with_name("chart_keys.json")
#: Names of JSON's types for what YAML loads.
TYPES = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}


def keys(values: dict[str, Any], known: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key of the values as a path, and its value; those below an object only if that is ``known``."""
    for name, value in values.items():
        each = f"{path}.{name}" if path else name
        yield each, value
        if isinstance(value, dict) and known(each):
            yield from keys(value, known, each)


def problems(values: dict[str, Any], record: dict[str, Any]) -> list[str]:
    """Return the keys that the chart does not have, and those with a value of a type that it does not accept."""
    found = []
    for path, value in keys(values, lambda path: record.get(path, {}).get("closed")):
        if path not in record:
            found.append(f"{path}: unknown")
        elif TYPES[type(value)] not in record[path]["types"]:
            found.append(f"{path}: {TYPES[type(value)]}, not {' or '.join(record[path]['types'])}")
    return found


def recorded(values: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Return, by path, the types that a schema accepts, and whether it lists all keys below (``closed``)."""

    def found(path: str) -> dict[str, Any]:
        part = schema
        for name in path.split("."):
            patterns = part.get("patternProperties", {}).items()
            inside = [each for pattern, each in patterns if re.search(pattern, name)]
            part = part.get("properties", {}).get(name) or inside[0]
            while "$ref" in part:
                target: Any = schema
                for word in part["$ref"].removeprefix("#/").split("/"):
                    target = target[word]
                part = {**target, **{key: value for key, value in part.items() if key != "$ref"}}
        return part

    def closed(path: str) -> bool:
        return found(path).get("additionalProperties") is False

    types = {path: found(path)["type"] for path, _ in keys(values, closed)}
    return {
        path: {"types": [each] if isinstance(each, str) else each, "closed": closed(path)}
        for path, each in types.items()
    }


def merged(base: Any, over: Any) -> Any:
    """Return two documents of values merged as Helm does it."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return copy.deepcopy(over)
    return {name: merged(base.get(name), over[name]) if name in over else base[name] for name in base | over}


def main(checkout: Path) -> int:
    """Validate the values, and record what the schema says of them.  Needs jsonschema."""
    import jsonschema

    schema = yaml.safe_load((checkout / "jupyterhub/values.schema.yaml").read_text())
    values = yaml.safe_load(VALUES.read_text())
    whole = merged(yaml.safe_load((checkout / "jupyterhub/values.yaml").read_text()), values)
    jsonschema.Draft7Validator(schema).validate(whole)
    commit = subprocess.run(["git", "log", "-1", "--format=%h %cs"], cwd=checkout, capture_output=True, text=True)
    document = {"chart": commit.stdout.strip(), "keys": recorded(values, schema)}
    RECORD.write_text(json.dumps(document, indent=1) + "\n")
    print(f"valid; {len(document['keys'])} keys of {document['chart']} are recorded")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
