"""Room recipes: serve, status and stop for people and for scripts."""

from dataclasses import asdict

from images.build import Built
from images.console import emit_json, note, out, stage, table
from images.engine import Engine
from images.index import state_root
from recipes.run.contained import ContainerRecord, contained, contained_condition, start_contained, stop_contained
from recipes.run.longlived import Record, condition, find, in_flight, records, start, stop
from recipes.spec import Container, ServingSpec


def serve_recipe(spec: ServingSpec, engine: Engine | Built, box: Container | None, as_json: bool) -> None:
    """Start a server that stays, and say how to reach and to stop it.

    Raises EngineProblem when it doesn't become ready; nothing is left then.
    """
    with stage(f"starting {spec.recipe_id} on port {spec.port}") as update:
        if box is None:
            record: Record | ContainerRecord = start(spec, engine, state_root(), update)
        else:
            record = start_contained(spec, box, update)
    if as_json:
        emit_json(asdict(record))
        return
    console = out()
    console.print(f"{record.recipe} is ready: {record.url}/v1 serves the model {record.served_name!r}", markup=False)
    console.print(f"log: {record.log}", markup=False)
    console.print(f"stop it with: ./inv stop --port {record.port}", markup=False)


def known_servers() -> list[Record | ContainerRecord]:
    """Every server that is ours: processes by their records, containers by their labels."""
    return [*records(state_root()), *contained()]


def _condition(record: Record | ContainerRecord) -> str:
    return condition(record) if isinstance(record, Record) else contained_condition(record)


def _described(record: Record | ContainerRecord) -> dict:
    state = _condition(record)
    return {**asdict(record), "state": state, "in_flight": in_flight(record) if state == "ready" else None}


def show_servers(as_json: bool) -> None:
    """Print every recorded server and its state."""
    described = [_described(record) for record in known_servers()]
    if as_json:
        emit_json(described)
        return
    if not described:
        out().print("No server is recorded. `./inv serve` starts one.")
        return
    rows = [
        (
            each["state"],
            each["recipe"],
            each["url"],
            "–" if each["in_flight"] is None else str(each["in_flight"]),
            each["started"],
            str(each["pid"]) if "pid" in each else f"container {each['container'][:12]}",
        )
        for each in described
    ]
    console = out()
    console.print(table("Servers", ("state", "recipe", "url", "in flight", "started", "process"), rows))
    if any(each["state"] == "gone" for each in described):
        console.print("\ngone: its process ended, or the machine was rebooted; `./inv stop --port …` forgets it")


def stop_server(port: int | None, drain_s: float, as_json: bool) -> None:
    """Stop a recorded server and say how many requests were cut off."""
    record = find(known_servers(), port)
    state = _condition(record)

    with stage(f"stopping {record.recipe} on port {record.port}") as update:

        def say(left: int | None) -> None:
            update(f"{left} requests in flight")

        if isinstance(record, Record):
            cut = stop(record, state_root(), drain_s, say)
        else:
            cut = stop_contained(record, drain_s, say)
    if as_json:
        emit_json({"port": record.port, "recipe": record.recipe, "was": state, "cut": cut})
    elif state == "gone":
        note(f"{record.recipe} on port {record.port} was gone already; it is forgotten")
    else:
        said = "an unknown number of" if cut is None else "no" if cut == 0 else str(cut)
        out().print(f"{record.recipe} on port {record.port} is stopped; {said} request(s) were cut off", markup=False)
