"""Makes a Helm chart of the manifests beside it: `chart.py FOLDER [IMAGE]`.

IMAGE is the gateway's, if not that of the manifests; its tag is the chart's version.

The manifests stay the only source. A value of the chart is a place in them, and its default is what
stands there; so with the defaults the chart is what `kubectl apply -k` applies of gateway/.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GATEWAY, VLLM = "gateway/gateway.yaml", "fleet/vllm.yaml"
POLICY, ENDPOINTS = "fleet/policy.toml", "fleet/endpoints.yaml"

#: Value -> the manifest that has it, where (the group of the pattern), and what it is.
VALUES = {
    "gateway.image": (GATEWAY, r"image: (\S+)", "made by docs/kubernetes/Dockerfile"),
    "gateway.promptsPerStep": (GATEWAY, r"--prompts-per-step=(\d+)", "of the trainer's batch"),
    "vllm.image": (VLLM, r"image: (\S+)", "vLLM 0.32 or later"),
    "vllm.replicas": (VLLM, r"replicas: (\d+)", "servers; the endpoints file names as many"),
    "vllm.gpus": (VLLM, r'nvidia.com/gpu: "(\d+)"', "of each server"),
    "vllm.memory": (VLLM, r"memory: (\d+Gi)", "of each server"),
    "keys.secret": (None, r"(rollout-sched-keys)", "a Secret: clients, trainers, ..."),
    "store.size": (GATEWAY, r"storage: (\w+)", "of the gateway's volume"),
    "weights.size": (VLLM, r"storage: (\w+)", "of the volume that trainer and servers share"),
}

CLASS = "\n%sstorageClassName: {{ . }}{{ end }}"
#: A value that no manifest has -> the manifest, behind which text, the template, its default, and
#: what it is.
ADDED: dict[str, tuple[str, str, str, Any, str]] = {
    "vllm.args": (
        *(VLLM, "- --enable-scale-out"),
        "{{ range .Values.vllm.args }}\n        - {{ toJson . }}{{ end }}",
        *([], "more arguments, such as --tensor-parallel-size=2"),
    ),
    "store.storageClass": (
        *(GATEWAY, "accessModes: [ReadWriteOnce]"),
        "{{ with .Values.store.storageClass }}" + CLASS % (6 * " "),
        *("", "empty: the cluster's default"),
    ),
    "weights.storageClass": (
        *(VLLM, "accessModes: [ReadWriteMany]"),
        "{{ with .Values.weights.storageClass }}" + CLASS % (2 * " "),
        *("", "one that many nodes can mount"),
    ),
}

FILES = """\
apiVersion: v1
kind: ConfigMap
metadata: {name: rollout-sched-policy}
data:
  policy.toml: {{ toJson .Values.policy }}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: rollout-sched-endpoints}
data:
  endpoints.yaml: |
"""


def chart(image: str | None = None) -> dict[str, str]:
    """The text of each file."""
    manifests = {name: (HERE / name).read_text() for name in (GATEWAY, VLLM)}
    values: dict[str, tuple[Any, str]] = {}
    for name, (file, pattern, about) in VALUES.items():
        for place in [file] if file else manifests:
            manifests[place], found = _opened(manifests[place], pattern, name)
            values[name] = (int(found) if found.isdigit() else found, about)
    for name, (file, behind, template, default, about) in ADDED.items():
        before, after = manifests[file].split(behind)
        manifests[file] = before + behind + template + after
        values[name] = (default, about)
    if image:
        values["gateway.image"] = (image, values["gateway.image"][1])
    version = values["gateway.image"][0].rpartition(":")[2]
    policy = (HERE / POLICY).read_text()
    return {
        "Chart.yaml": "apiVersion: v2\nname: rollout-sched\n"
        "description: A scheduler of rollouts in front of a vLLM fleet\n"
        f"version: {version}\nappVersion: {json.dumps(version)}\n",
        "values.yaml": _values(values, policy),
        "values.schema.json": json.dumps(_schema(values), indent=1),
        "templates/gateway.yaml": manifests[GATEWAY],
        "templates/vllm.yaml": manifests[VLLM],
        "templates/files.yaml": FILES + _endpoints(),
    }


def _opened(text: str, pattern: str, value: str) -> tuple[str, str]:
    """The text with a template in each place, and what stood there, which is the same in all."""
    (found,) = set(re.findall(pattern, text))

    def template(place: re.Match[str]) -> str:
        return place[0].replace(found, f"{{{{ .Values.{value} }}}}")

    return re.sub(pattern, template, text), found


def _endpoints() -> str:
    """The endpoints file for any number of servers, in the place of those that it names."""
    head, *rows = re.split(r"^(?=- )", (HERE / ENDPOINTS).read_text(), flags=re.MULTILINE)
    row = rows[0].strip().replace("vllm-0", "vllm-{{ . }}")
    indented = "".join(f"    {line}\n" for line in head.splitlines())
    each = "{{- range until (int .Values.vllm.replicas) }}"
    return f"{indented}    {each}\n    {row}\n    {{{{- end }}}}\n"


def _values(values: dict[str, tuple[Any, str]], policy: str) -> str:
    lines, section = ["# Each value, and what it is.", ""], ""
    for name, (default, about) in sorted(values.items()):
        table, _, key = name.partition(".")
        lines += [f"{table}:"] * (table != section)
        lines.append(f"  {key}: {json.dumps(default)}  # {about}")
        section = table
    lines += ["# A policy file: --set-file policy=mine.toml", "policy: |"]
    return "\n".join([*lines, *(f"  {line}".rstrip() for line in policy.splitlines()), ""])


def _schema(values: dict[str, tuple[Any, str]]) -> dict[str, Any]:
    """A value that is misspelt is refused."""
    kinds = {int: {"type": "integer", "minimum": 1}, str: {"type": "string"}}
    texts = {"type": "array", "items": {"type": "string"}}
    tables: dict[str, Any] = {"policy": {"type": "string"}, "global": {"type": "object"}}
    for name, (default, _) in values.items():
        table, _, key = name.partition(".")
        tables.setdefault(table, {"type": "object", "properties": {}})
        tables[table]["properties"][key] = kinds.get(type(default), texts)
        tables[table]["additionalProperties"] = False
    return {"type": "object", "properties": tables, "additionalProperties": False}


def main(folder: str, image: str | None = None) -> None:
    for name, text in chart(image).items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
