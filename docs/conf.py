"""The site of these pages: `make docs`. The reference is generated from the code."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rollout_sched
from rollout_sched import cli, config
from rollout_sched.core.errors import RolloutError
from rollout_sched.simulators.replay.faults import KINDS
from rollout_sched.simulators.replay.scenario import Scenario

sys.path.insert(0, str(Path(__file__).parent))
import openapi

project = "rollout_sched"
release = rollout_sched.__version__
extensions = ["myst_nb"]
nb_execution_raise_on_error = True
nb_execution_timeout = 300  # seconds a cell
nb_execution_in_temp = True
html_theme = "furo"
html_title = "rollout_sched"
exclude_patterns = ["kubernetes", "slurm"]
myst_heading_anchors = 4

REFERENCE = Path(__file__).parent / "reference"
#: Where the files are that lie outside of this folder; empty: their names are not links.
REPOSITORY = os.environ.get("DOCS_REPOSITORY", "")


def setup(app: Any) -> None:
    app.connect("builder-inited", lambda app: write_reference())
    app.connect("source-read", link_to_repository)


#: A Markdown link to a file that is not a page: beside this folder, or in it.
ELSEWHERE = re.compile(r"\[([^]]+)\]\((\.\./|(?:kubernetes|slurm)/|grafana)([^)]*)\)")


def link_to_repository(app: Any, page: str, source: list[str]) -> None:
    """Files that are not pages are links into the repository, if it is known."""

    def link(found: re.Match[str]) -> str:
        text, folder, name = found.groups()
        path = name if folder == "../" else f"docs/{folder}{name}"
        return f"[{text}]({REPOSITORY}/{path})" if REPOSITORY else text

    source[0] = ELSEWHERE.sub(link, source[0])


# ------------------------------------------------------------------------------------------
# The reference, a page for each kind of thing.


def write_reference() -> None:
    REFERENCE.mkdir(exist_ok=True)
    pages = {
        "cli": ("The command line", command_line()),
        "presets": ("Shipped policies", presets()),
        "roles": ("The tables of a policy file", roles()),
        "scenario": ("The tables of a scenario file", scenario()),
        "python": ("Names of the Python package", python_names()),
        "http": ("The HTTP API", http()),
        "errors": ("Errors", errors(RolloutError)),
    }
    for name, (title, lines) in pages.items():
        text = "\n".join([f"# {title}", "", *lines, ""])
        path = REFERENCE / f"{name}.md"
        if not path.exists() or path.read_text() != text:  # else Sphinx would read it again
            path.write_text(text)


def verbatim(text: str) -> list[str]:
    return ["", "```text", *text.strip().splitlines(), "```", ""]


def described(named: Any) -> list[str]:
    return verbatim(inspect.getdoc(named) or "")


def command_line() -> Iterator[str]:
    os.environ["COLUMNS"] = "96"
    for command in cli.COMMANDS:
        name = f"rollout-sched {command.name}"
        parser = argparse.ArgumentParser(prog=name, description=command.about)
        command.add_arguments(parser)
        yield f"## {name}"
        yield from verbatim(parser.format_help())
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for verb_name, verb in action.choices.items():
                    yield f"### {name} {verb_name}"
                    yield from verbatim(verb.format_help())


def presets() -> Iterator[str]:
    for name in config.shipped("policies/presets"):
        policy = config.load_policy(name)
        yield from (f"## {name}", "", policy.about, "", f"Source: {policy.source}.", "")
        if policy.differs:
            yield from (f"How it differs: {policy.differs}", "")
        used = (
            (role, policy.tables[role]["use"]) for role in policy.roles if role in policy.tables
        )
        yield from (", ".join(f"`{role}` {use}" for role, use in used), "")


def roles() -> Iterator[str]:
    for role, choices in config.REGISTRY.items():
        yield from (f"## [{role}]", "", f"Without the table: `{config.DEFAULTS[role]}`.", "")
        for name, cls in choices.items():
            yield f'### use = "{name}"'
            yield from described(cls)
            keys = [
                f"{key.name} = {key.default!r}".replace("<class 'inspect._empty'>", "required")
                for key in inspect.signature(cls).parameters.values()
                if key.name not in config.SUPPLIED
            ]
            if keys:
                yield from verbatim("\n".join(keys))


def scenario() -> Iterator[str]:
    yield from described(Scenario)
    for field in Scenario.__struct_fields__:
        hint = inspect.get_annotations(Scenario)[field]
        yield from tables(f"[{field}]", str(hint))
    for name, kind in KINDS.items():
        yield f'## [[faults]], kind = "{name}"'
        yield from described(kind)


def tables(title: str, hint: str) -> Iterator[str]:
    module = inspect.getmodule(Scenario)
    for name in re.findall(r"[A-Z]\w+", hint):
        cls = getattr(module, name, None)
        if inspect.isclass(cls) and hasattr(cls, "__struct_fields__"):
            yield f"## {title}"
            yield from described(cls)


def python_names() -> Iterator[str]:
    for name in rollout_sched.__all__:
        value = getattr(rollout_sched, name)
        if inspect.isclass(value):
            yield f"## {name}"
            yield from described(value)
            for method, function in inspect.getmembers(value, inspect.isfunction):
                if not method.startswith("_") and inspect.getdoc(function):
                    asynchronous = "async " * inspect.iscoroutinefunction(function)
                    yield f"### {name}.{method}"
                    yield from verbatim(
                        f"{asynchronous}{method}{inspect.signature(function)}\n\n{inspect.getdoc(function)}"
                    )
        elif inspect.isfunction(value):
            yield f"## {name}"
            yield from verbatim(f"{name}{inspect.signature(value)}\n\n{inspect.getdoc(value)}")


def http() -> Iterator[str]:
    (REFERENCE / "openapi.json").write_text(json.dumps(openapi.document(), indent=1))
    yield (
        "Every call that the gateway answers itself, [as OpenAPI](openapi.json) with the schema of "
        "each body; what they mean is in [gateway](../gateway.md). Calls that go to instances, "
        "such as those of [weight updates](../weights.md), have the API of vLLM or SGLang. "
        "Errors have OpenAI's format."
    )
    yield from ("", "| call | key | |", "|---|---|---|")
    for route in openapi.routes():
        about = " ".join(route.about.partition("\n\n")[0].split())
        yield f"| `{route.method} {route.path}` | {route.access} | {about} |"


def errors(kind: type[BaseException]) -> Iterator[str]:
    yield f"## {kind.__name__}"
    yield from described(kind)
    for child in sorted(kind.__subclasses__(), key=lambda child: child.__name__):
        yield from errors(child)
