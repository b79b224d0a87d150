"""The JSON Schema of a dashboard, drawn from the SDK's own typed models.

The SDK writes Grafana's schema down as annotated classes. A schema made of them refuses a key they do not know, a value
of another type and a word that is none of an enumeration, also in a panel's options and queries, which a dashboard's
own schema leaves open.
"""

import enum
import typing
from importlib import import_module
from typing import Any

import jsonschema
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import dashboard, prometheus

TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}


def faults(board: dict[str, Any]) -> list[str]:
    """What in a dashboard is not as the SDK's models say."""
    found = _faults_of(board, dashboard.Dashboard, "dashboard")
    for panel in board["panels"]:
        of_panel = import_module("grafana_foundation_sdk.models." + panel["type"].replace("-", ""))
        found += _faults_of(panel.get("options", {}), of_panel.Options, panel["title"])
        if hasattr(of_panel, "FieldConfig"):
            custom = panel["fieldConfig"]["defaults"].get("custom", {})
            found += _faults_of(custom, of_panel.FieldConfig, panel["title"])
    return found


def _faults_of(value: object, model: type, where: str) -> list[str]:
    definitions: dict[str, Any] = {}
    schema = {**_schema(model, definitions), "definitions": definitions}
    validator = jsonschema.Draft7Validator(schema)
    return [f"{where}: {error.json_path}: {error.message}" for error in validator.iter_errors(value)]


def _schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if typing.get_origin(hint):
        return _schema_of_generic(typing.get_origin(hint), typing.get_args(hint), definitions)
    if hint is Dataquery:  # any data source's; here all are Prometheus's
        hint = prometheus.Dataquery
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    if hasattr(hint, "to_json"):
        return _reference(hint, definitions)
    return {"type": TYPES[hint]} if hint in TYPES else {}  # `object` and Any are open


def _schema_of_generic(origin: Any, inside: tuple[Any, ...], definitions: dict[str, Any]) -> dict[str, Any]:
    if origin is typing.Literal:
        return {"enum": list(inside)}
    schemas = [_schema(one, definitions) for one in inside]
    if origin is list:
        return {"type": "array", "items": schemas[0]}
    if origin is dict:
        return {"type": "object", "additionalProperties": schemas[1]}
    return {"anyOf": schemas}


def _reference(model: type, definitions: dict[str, Any]) -> dict[str, Any]:
    name = f"{model.__module__.rpartition('.')[2]}.{model.__name__}"
    if name not in definitions:
        definitions[name] = {}  # a model may contain itself
        hints = typing.get_type_hints(model)
        properties = {key: _schema(hints[attribute], definitions) for key, attribute in _json_names(model, hints)}
        definitions[name] = {"type": "object", "additionalProperties": False, "properties": properties}
    return {"$ref": f"#/definitions/{name}"}


def _json_names(model: Any, hints: dict[str, Any]) -> list[tuple[str, str]]:
    """Which attribute each JSON key shows: an instance whose every attribute holds its own name tells."""
    probe = object.__new__(model)
    for attribute in hints:
        setattr(probe, attribute, attribute)
    return [(key, attribute) for key, attribute in model.to_json(probe).items() if attribute in hints]
