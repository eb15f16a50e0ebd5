"""The manifests agree with each other, with our commands, and with what the gateway serves."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollout_sched.cli import main, parse
from rollout_sched.flags import given_flags
from rollout_sched.integrations.gateway.endpoints_file import parse_endpoints
from rollout_sched.integrations.gateway.options import Options, given_options
from rollout_sched.integrations.gateway.serve import LAST_WORDS_S
from rollout_sched.integrations.ray.deployment import Deployment
from tests.integrations.gateway.gateway_fixture import House, Upstream
from tests.kubernetes.manifests import (
    FOLDER,
    NAME,
    Object,
    containers,
    objects,
    of_kind,
    patch,
    pod_templates,
)
from tests.neighbours.fleet import fake_instance

PAGE = FOLDER.parent / "kubernetes.md"
DEPLOYMENTS = ("gateway", "elastic", "ray")


def templates(folder: str) -> dict[str, Object]:
    return dict(found for thing in objects(folder) for found in pod_templates(thing))


def ours(folder: str) -> list[Object]:
    """The containers of our image that run one of our commands."""
    return [
        container
        for template in templates(folder).values()
        for container in containers(template)
        if container["image"].startswith("rollout-sched:") and "command" not in container
    ]


def gateway() -> Object:
    (container,) = ours("gateway")
    return container


def options(container: Object) -> Any:
    return parse(container["args"])


def flag(container: Object, name: str) -> str:
    (value,) = [arg.partition("=")[2] for arg in container["args"] if arg.startswith(f"{name}=")]
    return value


def mount_of(container: Object, path: str) -> Object:
    """The mount that a path lies in."""
    found = [m for m in container["volumeMounts"] if Path(path).is_relative_to(m["mountPath"])]
    assert found, f"{path} lies in no mount"
    return found[0]


def volume(template: Object, name: str) -> Object:
    (found,) = [volume for volume in template["spec"]["volumes"] if volume["name"] == name]
    return found


@pytest.mark.parametrize("folder", ["gateway", "elastic"])
def test_our_commands_take_every_flag(folder: str) -> None:
    commands = ours(folder)
    assert commands
    for container in commands:
        options(container)  # exits where one is not known


def ray_up() -> list[str]:
    """The arguments of our command, which the head is to run."""
    job = of_kind("RayJob", objects("ray"))["rollout-sched-up"]
    command, *arguments = job["spec"]["entrypoint"].split()
    assert command == "rollout-sched"
    return arguments


def test_the_head_starts_what_our_command_knows() -> None:
    given = parse(ray_up())
    options, deployment = given_options(given), given_flags(given, Deployment)
    found = objects("ray")
    job, cluster = of_kind("RayJob", found), of_kind("RayCluster", found)
    (name,) = cluster
    assert job["rollout-sched-up"]["spec"]["clusterSelector"] == {"ray.io/cluster": name}
    assert deployment["fronts"] == "per-node"
    head, *workers = (next(containers(t)) for _, t in pod_templates(cluster[name]))
    for arg in ray_up():
        path = arg.partition("=")[2]
        if path.startswith("/"):
            assert "subPath" not in mount_of(head, path)
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert ports == {"http": options.port, "control": deployment["scheduler_port"]}
    for worker in workers:
        assert worker["ports"] == [{"name": "http", "containerPort": options.port}]
        assert worker["image"] == head["image"]
    gateway_s = {arg for arg in gateway()["args"] if arg.startswith(("--policy", "--endpoints"))}
    assert gateway_s <= set(ray_up())


def test_ray_is_of_one_version() -> None:
    (cluster,) = of_kind("RayCluster", objects("ray")).values()
    version = cluster["spec"]["rayVersion"]
    pins = (FOLDER.parents[1] / "tests/ray/requirements.txt").read_text()
    assert re.search(rf"^ray(\[\w+\])?=={re.escape(version)}$", pins, re.M)
    assert f"ray[default]=={version}" in PAGE.read_text()
    assert f"ray[default]=={version}" in (FOLDER / "Dockerfile").read_text()


def test_every_file_that_is_named_is_mounted_from_something_that_is_there() -> None:
    found = objects("gateway")
    template, container = templates("gateway")["rollout-sched"], gateway()
    told = " ".join(PAGE.read_text().split())
    for arg in container["args"]:
        name, _, path = arg.partition("=")
        if not path.startswith("/"):
            continue
        mount = mount_of(container, path)
        assert "subPath" not in mount, "kubelet does not update what is mounted by subPath"
        if mount["name"] in [claim["metadata"]["name"] for claim in claims()]:
            continue
        source = volume(template, mount["name"])
        if "configMap" in source:
            config = of_kind("ConfigMap", found)[source["configMap"]["name"]]
            assert Path(path).name in config["data"], name
        elif "secret" in source:
            assert f"create secret generic {source['secret']['secretName']} " in told
            assert f"--from-literal={Path(path).name}=" in told, name
        else:
            assert source["persistentVolumeClaim"]["claimName"] in of_kind(
                "PersistentVolumeClaim", found
            )


def claims() -> list[Object]:
    spec = of_kind("StatefulSet", objects("gateway"))["rollout-sched"]["spec"]
    found: list[Object] = spec["volumeClaimTemplates"]
    return found


def test_the_store_outlives_the_pod() -> None:
    store = mount_of(gateway(), flag(gateway(), "--store"))
    assert store["name"] in [claim["metadata"]["name"] for claim in claims()]
    assert not store.get("readOnly")
    spec = of_kind("StatefulSet", objects("gateway"))["rollout-sched"]["spec"]
    assert spec["replicas"] == 1, "a store is one process's"


def test_the_policy_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "check", str(FOLDER / "fleet/policy.toml")]) == 0
    assert "valid" in capsys.readouterr().out


def test_the_endpoints_are_the_pods() -> None:
    found = objects("fleet")
    servers = of_kind("StatefulSet", found)["vllm"]["spec"]
    service = of_kind("Service", found)[servers["serviceName"]]
    assert service["spec"]["clusterIP"] == "None", "else its pods have no names"
    (port,) = service["spec"]["ports"]
    (server,) = servers["template"]["spec"]["containers"]
    assert f"--port={port['port']}" in server["args"]
    path = FOLDER / "fleet/endpoints.yaml"
    urls = [endpoint.url for endpoint in parse_endpoints(path, path.read_bytes())]
    name = service["metadata"]["name"]
    assert urls == [f"http://vllm-{n}.{name}:{port['port']}" for n in range(servers["replicas"])]


@pytest.mark.parametrize("folder", DEPLOYMENTS)
def test_every_selector_finds_pods(folder: str) -> None:
    found = objects(folder)
    labels = [template["metadata"]["labels"] for template in templates(folder).values()]
    for service in of_kind("Service", found).values():
        assert service["spec"]["selector"] in labels
    told = PAGE.read_text()
    for policy in of_kind("NetworkPolicy", found).values():
        assert policy["spec"]["podSelector"]["matchLabels"] in labels
        for peer in (peer for rule in policy["spec"]["ingress"] for peer in rule.get("from", ())):
            ((name, value),) = peer["podSelector"]["matchLabels"].items()
            known = {name: value} in labels or value in of_kind("RayJob", found)
            assert known or f"{name}: {value}" in told, "who deploys those pods must know"
    for sets in of_kind("StatefulSet", found).values():
        spec = sets["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]


def reached(policy: Object, *, labels: Object, namespace: str = "ours") -> set[str | int]:
    """The ports that the pods of a policy open to a pod; "every" stands for all of them."""
    ports: set[str | int] = set()
    for rule in policy["spec"]["ingress"]:
        peers = rule.get("from", [{"podSelector": {}, "namespaceSelector": {}}])
        for peer in peers:
            near = namespace == "ours" or "namespaceSelector" in peer
            if near and peer["podSelector"].get("matchLabels", {}).items() <= labels.items():
                ports |= {port["port"] for port in rule.get("ports", [{"port": "every"}])}
    return ports


def test_strangers_reach_only_what_asks_for_a_key() -> None:
    policies = of_kind("NetworkPolicy", objects("ray"))
    vllm, ray = policies["vllm"], policies["rollout-sched"]
    for template in templates("ray").values():
        (covered,) = [p for p in policies.values() if selects(p, template)]
        assert covered["spec"]["policyTypes"] == ["Ingress"]
    ours, stranger = {NAME: "rollout-sched"}, {NAME: "web"}
    operator = {"app.kubernetes.io/component": "kuberay-operator"}
    submitter = {"batch.kubernetes.io/job-name": "rollout-sched-up"}
    keyed = {"http", "control"}
    assert reached(vllm, labels=stranger) == set()
    assert reached(vllm, labels=ours) == {"http"}
    assert reached(ray, labels=ours) == keyed | {"every"}
    assert reached(ray, labels=operator, namespace="ray-system") == keyed | {8265}
    assert reached(ray, labels=submitter) == keyed | {8265}
    for labels, namespace in ((stranger, "ours"), (ours, "theirs"), (submitter, "theirs")):
        assert reached(ray, labels=labels, namespace=namespace) == keyed


def selects(policy: Object, template: Object) -> bool:
    chosen = policy["spec"]["podSelector"]["matchLabels"]
    return bool(chosen.items() <= template["metadata"]["labels"].items())


def probes(container: Object) -> dict[str, Object]:
    return {name: value for name, value in container.items() if name.endswith("Probe")}


@pytest.mark.real_time
async def test_our_probes_ask_what_the_gateway_answers_without_a_key(tmp_path: Path) -> None:
    container = gateway()
    assert set(probes(container)) == {"startupProbe", "readinessProbe", "livenessProbe"}
    ports = [port["name"] for port in container["ports"]]
    key = tmp_path / "keys"
    key.write_text("secret")
    async with House(Upstream(), api_key_file=key) as house:
        found = []
        for probe in probes(container).values():
            assert probe["httpGet"]["port"] in ports
            async with aiohttp.ClientSession(house.service.url) as nobody:
                found.append((await nobody.get(probe["httpGet"]["path"])).status)
        assert found == [200, 200, 200]


def test_the_servers_probes_ask_what_vllm_answers() -> None:
    (server,) = templates("fleet")["vllm"]["spec"]["containers"]
    with fake_instance() as instance:
        for probe in probes(server).values():
            with urllib.request.urlopen(instance.url + probe["httpGet"]["path"]) as answer:
                assert answer.status == 200


def test_a_pod_is_given_the_time_to_drain() -> None:
    container, spec = gateway(), templates("gateway")["rollout-sched"]["spec"]
    given = given_options(options(container))
    drain, grace = given.drain_s, given.grace_s
    assert drain >= 5.0, "until the Service sends nobody any more"
    assert grace > Options(policy="").grace_s, "long answers take longer than by default"
    margin = 10.0  # to write what remains
    least = drain + grace + LAST_WORDS_S + margin
    assert spec["terminationGracePeriodSeconds"] >= least


def test_the_port_is_the_services() -> None:
    container = gateway()
    (port,) = container["ports"]
    assert given_options(options(container)).port == port["containerPort"]
    (served,) = of_kind("Service", objects("gateway"))["rollout-sched"]["spec"]["ports"]
    assert served["targetPort"] == port["name"]


def test_the_key_of_the_servers_is_the_one_that_the_gateway_sends() -> None:
    (server,) = templates("fleet")["vllm"]["spec"]["containers"]
    keys = {env["name"]: env["valueFrom"] for env in server["env"] if "valueFrom" in env}
    reference = keys["VLLM_API_KEY"]["secretKeyRef"]
    assert Path(flag(gateway(), "--instance-api-key-file")).name == reference["key"]
    secret = volume(templates("gateway")["rollout-sched"], "keys")["secret"]["secretName"]
    assert secret == reference["name"]


def test_the_sidecar_writes_the_file_that_the_gateway_reads() -> None:
    template = patch("elastic/sidecar.yaml")["spec"]["template"]
    (sidecar,) = template["spec"]["initContainers"]
    script, (service, port, path) = sidecar["command"][-1], sidecar["args"]
    assert path == flag(gateway(), "--endpoints")
    assert path in sidecar["startupProbe"]["exec"]["command"]
    assert mount_of(sidecar, path)["name"] == mount_of(gateway(), path)["name"]
    found = objects("elastic")
    assert int(port) in [p["port"] for p in of_kind("Service", found)[service]["spec"]["ports"]]
    source = volume(template, mount_of(sidecar, script)["name"])["configMap"]["name"]
    assert Path(script).name in of_kind("ConfigMap", found)[source]["data"]


def test_the_page_names_what_is_there() -> None:
    told = PAGE.read_text()
    for path in re.findall(r"docs/kubernetes/[\w./-]*\w", told):
        assert (FOLDER.parents[1] / path).exists(), path
