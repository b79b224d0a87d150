"""What is wrong with an expression, told from its parse tree and from the catalogue of metrics."""

import re
from collections.abc import Iterator
from typing import Any

import promql_parser as promql

from arena.probe import Kind
from telemetry.names import EXPORTED, PREFIX, Exported

RISES = ("rate", "increase")
PLACE = frozenset({"job", "instance"})


def faults(expr: str, records: dict[str, set[str]]) -> list[str]:
    """Name them; `records` are the recorded series with their labels."""
    try:
        tree = promql.parse(expr)
    except ValueError as error:
        return [f"does not parse: {error}"]
    return list(_faults(tree, records, within=""))


def _faults(node: Any, records: dict[str, set[str]], *, within: str) -> Iterator[str]:
    if isinstance(node, promql.VectorSelector):
        yield from _selector_faults(node, records, within)
    elif isinstance(node, promql.AggregateExpr):
        kept = set(node.modifier.labels) if node.modifier else set()
        if lost := labels_that_tell_apart(node.expr, records) - kept:
            yield f"{node.op} loses {sorted(lost)}"
    elif isinstance(node, promql.BinaryExpr):
        yield from _join_faults(node, records)
    function = node.func.name if isinstance(node, promql.Call) else ""
    for child in children(node):
        yield from _faults(child, records, within=function if isinstance(child, promql.MatrixSelector) else within)


def children(node: Any) -> list[Any]:
    """The expressions inside an expression."""
    if isinstance(node, promql.BinaryExpr):
        return [node.lhs, node.rhs]
    if isinstance(node, promql.Call):
        return list(node.args)
    if isinstance(node, promql.MatrixSelector):
        return [node.vector_selector]
    inside = getattr(node, "expr", None)
    return [] if inside is None else [inside]


def selectors(node: Any) -> Iterator[promql.VectorSelector]:
    """Every selector of a series in it."""
    if isinstance(node, promql.VectorSelector):
        yield node
    for child in children(node):
        yield from selectors(child)


def metric(name: str) -> Exported | None:
    """The metric that a series belongs to."""
    bare = name.removeprefix(PREFIX) if name.startswith(PREFIX) else ""
    if found := EXPORTED.get(bare):
        return None if found.kind == Kind.HISTOGRAM else found
    found = EXPORTED.get(re.sub("_(bucket|sum|count)$", "", bare))
    return found if found and found.kind == Kind.HISTOGRAM else None


def labels_of(name: str, records: dict[str, set[str]]) -> set[str] | None:
    """The labels of a series, or nothing if no such series is known."""
    if name == "up":
        return set(PLACE)
    if name in records:
        return records[name]
    known = metric(name)
    return known and {*PLACE, *known.label_names, *(["le"] if name.endswith("_bucket") else [])}


def labels_that_tell_apart(node: Any, records: dict[str, set[str]]) -> set[str]:
    """What must survive an aggregation: the target, and the queue or the group."""
    found = set().union(*(labels_of(one.name, records) or PLACE for one in selectors(node)))
    return found & (PLACE | {"queue", "group"})


def _selector_faults(node: promql.VectorSelector, records: dict[str, set[str]], within: str) -> Iterator[str]:
    labels = labels_of(node.name, records)
    if labels is None:
        yield f"{node.name} is no metric"
        return
    known = metric(node.name)
    if not node.name.startswith("arena"):
        return  # another program's
    if (rises := bool(known and known.kind in (Kind.COUNTER, Kind.HISTOGRAM))) != (within in RISES):
        yield f"{node.name} is a {'counter' if rises else 'gauge'} {f'in {within}()' if within else 'taken as it is'}"
    closed = dict(known.labels) if known else {}
    for matcher in node.matchers.matchers:
        if matcher.name not in labels:
            yield f"{node.name} has no label {matcher.name}"
        values = closed.get(matcher.name) or ()
        if values and (unknown := set(matcher.value.split("|")) - set(values)):
            yield f"{node.name} has no {matcher.name} {sorted(unknown)}"


def _join_faults(node: promql.BinaryExpr, records: dict[str, set[str]]) -> Iterator[str]:
    """Two vectors meet on every label that tells queues apart, or on all of their labels."""
    if not (node.modifier and node.modifier.matching):
        return
    needed = labels_that_tell_apart(node, records)
    if lost := needed - set(node.modifier.matching.labels):
        yield f"{node.op} meets without {sorted(lost)}"
