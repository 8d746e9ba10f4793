"""What is in `deploy/` fits the published schemas, our own command line, and what is said of it (row I2)."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployed import arguments_of, built, dockerfile, documents, lws_of, stated_commands, units
from paths import REPOSITORY
from penstock import __version__
from penstock.cli.launched import Launched
from penstock.cli.program import build_app, run
from penstock.cli.settings import configured_server
from penstock.cli.terminal import Invocation
from penstock.config.declared import configured_engine
from penstock.config.hosts import DEFAULT_PORT, HostsConfig
from penstock.config.server import ServerConfig
from penstock.engine.supervisor.supervisor import FRONT_GRACE_S, STOP_GRACE_S
from penstock.process.link_ports import DEFAULT_LINK_PORTS
from penstock.process.service_manager import VARIABLE
from penstock.trust.identity import ClusterIdentity
from penstock.trust.join_token import head_token, worker_token
from served import Served

pytestmark = pytest.mark.doors

DEPLOY = REPOSITORY / "deploy"
BASE, CUDA = DEPLOY / "kubernetes" / "base", DEPLOY / "kubernetes" / "overlays" / "cuda"
PAGE = (REPOSITORY / "docs" / "clusters.md").read_text(encoding="utf-8")
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
PROGRAMS = Path(sys.executable).parent
OLDEST = "1.28"
GROUP = {"LWS_LEADER_ADDRESS": "penstock-0.penstock.default", "LWS_GROUP_SIZE": "2"}
END_S = ServerConfig().drain_s + FRONT_GRACE_S + STOP_GRACE_S


def checked(words: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Parse a command line of ours; hold the settings of `serve`, and of a head, against each other too."""
    out = StringIO()
    invocation = Invocation(stdout=out, stderr=out, stdin=StringIO(), environ=dict(environment or {}))
    _, bound, _ = build_app(invocation).parse_args(list(words), print_error=False, exit_on_error=False)
    if words[0] == "serve":
        configured_engine(bound.kwargs, *bound.args)
        configured_server(bound.kwargs)
    elif environment and (launched := Launched("lws", environment, "")).is_head:
        launched.serve(bound.args, bound.kwargs["join_token_file"], _checked_of_head, invocation)


def _checked_of_head(words: Sequence[str], invocation: Invocation) -> int:
    checked(words)
    return 0


@pytest.fixture
def api_key(tmp_path: Path) -> Path:
    path = tmp_path / "api-key"
    path.write_text("key\n", encoding="utf-8")
    return path


# --- Kubernetes -----------------------------------------------------------------------------------


def manifest(kind: str, name: str = "", folder: Path = BASE) -> dict[str, Any]:
    (found,) = [d for d in built(folder) if d["kind"] == kind and name in ("", d["metadata"]["name"])]
    return found


def pods(folder: Path = BASE) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the specs of the pods of head and worker."""
    template = manifest("LeaderWorkerSet", folder=folder)["spec"]["leaderWorkerTemplate"]
    return template["leaderTemplate"]["spec"], template["workerTemplate"]["spec"]


def container(pod: Mapping[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    return only


def test_the_base_lists_all_of_its_files() -> None:
    names = sorted(path.name for path in BASE.iterdir() if path.name != "kustomization.yaml")
    (kustomization,) = documents(BASE / "kustomization.yaml")
    assert kustomization["resources"] == names


@pytest.mark.parametrize("version", [OLDEST, "newest"])
@pytest.mark.parametrize("folder", [BASE, CUDA], ids=["base", "cuda"])
def test_manifests_fit_the_schemas_of_kubernetes(folder: Path, version: str) -> None:
    import kubernetes_validate  # of the extra `doors`, which other tests are collected without

    version = kubernetes_validate.latest_version() if version == "newest" else version
    for each in built(folder):
        if each["kind"] != "LeaderWorkerSet":
            kubernetes_validate.validate(each, version, strict=True)
            continue
        template = lws_of(each).spec.leaderWorkerTemplate
        for pod in (template.leaderTemplate, template.workerTemplate):
            shell = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": pod}
            kubernetes_validate.validate(shell, version, strict=True)


def test_a_manifest_with_a_wrong_field_is_seen() -> None:
    wrong = manifest("LeaderWorkerSet")
    wrong["spec"]["leaderWorkerTemplate"]["sizes"] = 2
    with pytest.raises(Exception, match="sizes"):
        lws_of(wrong)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
@pytest.mark.parametrize("folder", [BASE, CUDA], ids=["base", "cuda"])
def test_kustomize_builds_what_is_checked_here(folder: Path) -> None:
    words = ["kubectl", "kustomize", str(folder)]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    by_name = {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all(said)}
    assert by_name == {(d["kind"], d["metadata"]["name"]): d for d in built(folder)}


@pytest.mark.parametrize("folder", [BASE, CUDA], ids=["base", "cuda"])
def test_i2_all_pods_run_one_line_which_our_own_parser_takes(folder: Path, api_key: Path) -> None:
    head, worker = pods(folder)
    line = container(head)["args"]
    assert container(worker)["args"] == line
    group = lws_of(manifest("LeaderWorkerSet", folder=folder)).spec.leaderWorkerTemplate.size
    assert group == int(GROUP["LWS_GROUP_SIZE"])
    for number in range(group):
        checked(as_here(line, {"/run/api/api-key": str(api_key)}), GROUP | {"LWS_WORKER_INDEX": str(number)})
    threads = line[line.index("--threads-per-rank") + 1]
    for pod in (head, worker):
        assert container(pod)["resources"]["limits"]["cpu"] == threads


def as_here(words: Sequence[str], here: Mapping[str, str]) -> list[str]:
    return [here.get(word, word) for word in words]


def test_probes_ask_the_head_alone_and_wait_as_long_as_the_token_lives() -> None:
    head, worker = (container(pod) for pod in pods())
    paths = {name: head[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/health/live", "readiness": "/health/ready", "liveness": "/health/live"}
    startup = head["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == HostsConfig().join_token_ttl_s
    assert not [name for name in worker if name.endswith("Probe")]


def test_the_end_leaves_the_head_time_to_drain_and_workers_outlast_it() -> None:
    head, worker = pods()
    pause_s = float(container(head)["lifecycle"]["preStop"]["exec"]["command"][1])
    assert head["terminationGracePeriodSeconds"] >= pause_s + END_S
    assert worker["terminationGracePeriodSeconds"] > head["terminationGracePeriodSeconds"]


def test_a_worker_that_is_to_end_waits_while_the_head_listens() -> None:
    command = container(pods()[1])["lifecycle"]["preStop"]["exec"]["command"]
    with socket.create_server(("127.0.0.1", 0)) as head:
        here = [word.replace("8000", str(head.getsockname()[1])) for word in command]
        assert here != command
        waiting = subprocess.Popen(here, env=os.environ | {"LWS_LEADER_ADDRESS": "127.0.0.1"})
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(2.5)
    assert waiting.wait(10) is not None


def test_variables_of_services_are_no_settings_and_names_do_not_collide() -> None:
    name = manifest("LeaderWorkerSet")["metadata"]["name"]
    for pod in pods():
        assert pod["enableServiceLinks"] is False
        assert pod["automountServiceAccountToken"] is False
    assert (
        manifest("Service")["metadata"]["name"] != name
    )  # of the headless service that the controller makes


def test_the_network_policy_names_our_ports() -> None:
    (rule,) = manifest("NetworkPolicy", "penstock-links")["spec"]["ingress"]
    ports = {(port["port"], port.get("endPort", port["port"])) for port in rule["ports"]}
    links = (DEFAULT_LINK_PORTS.first, DEFAULT_LINK_PORTS.last)
    assert ports == {(DEFAULT_PORT, DEFAULT_PORT), links, (ServerConfig().port,) * 2}
    selected = manifest("NetworkPolicy", "penstock-links")["spec"]["podSelector"]
    assert rule["from"] == [{"podSelector": selected}]
    (rule,) = manifest("NetworkPolicy", "penstock-api")["spec"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == [ServerConfig().port]


def mounted(pod: Mapping[str, Any], name: str) -> set[str]:
    """Return the keys of the Secret in a volume."""
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == name]
    assert volume["secret"]["secretName"] == "penstock-cluster"
    return {item["key"] for item in volume["secret"]["items"]}


def test_r15_a_worker_gets_the_token_and_not_the_key_of_the_cluster() -> None:
    head, worker = pods()
    assert mounted(head, "cluster") == {"cluster.pem", "token"}
    assert mounted(worker, "cluster") == {"token"}
    assert [volume["name"] for volume in worker["volumes"] if "secret" in volume] == ["cluster"]
    for pod in pods():
        assert all(each["name"] != "cluster" for each in container(pod)["volumeMounts"])


@pytest.mark.parametrize("number", [0, 1], ids=["head", "worker"])
def test_r15_the_secret_of_the_page_is_taken_with_all_checks(tmp_path: Path, number: int) -> None:
    """Type the lines of the page, lay the Secret out as Kubernetes does, and run the init container."""
    new_token, _, create, _ = stated_commands(PAGE, "Kubernetes")[:4]
    made, secret, state = tmp_path / "cluster", tmp_path / "secret", tmp_path / "state"
    out = StringIO()
    words = [word.replace("cluster", str(made), 1) for word in new_token[1:]]
    assert run(words, Invocation(stdout=out, stderr=out, stdin=StringIO(), environ={})) == 0, out.getvalue()
    (made / "api-key").write_text("key\n", encoding="utf-8")
    files = [Path(word.partition("=")[2]) for word in create if word.startswith("--from-file=")]
    assert {path.name for path in files} == {"cluster.pem", "token", "api-key"}
    secret.mkdir()
    state.mkdir(mode=0o777)
    for path in files:
        if path.name in mounted(pods()[number], "cluster"):
            (secret / path.name).write_bytes((tmp_path / path).read_bytes())
            (secret / path.name).chmod(0o644)
    (init,) = pods()[number]["initContainers"]
    here = {"/run/cluster": str(secret), "/var/lib/penstock": str(state)}
    words = [re.sub("|".join(here), lambda match: here[match[0]], word) for word in init["command"]]
    subprocess.run(words, check=True, timeout=60)
    made_key = ClusterIdentity.open(made / "head", time.time).public_key
    assert worker_token(state / "token").is_pin_of(made_key)
    if number == 0:
        identity = ClusterIdentity.open(state / "head", time.time)
        assert identity.public_key == made_key
        head_token(state / "token", identity.public_key)


# --- images and Compose ---------------------------------------------------------------------------

DOCKERFILES = sorted((DEPLOY / "docker").iterdir())


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_are_built_from_what_there_is(path: Path) -> None:
    instructions = dockerfile(path)
    copied = [words[:-1] for words in map(str.split, arguments_of(instructions, "COPY"))]
    sources = {source for words in copied if not words[0].startswith("--from=") for source in words}
    assert all((REPOSITORY / source).exists() for source in sources)
    ignored = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert sources == {line[1:] for line in ignored if line.startswith("!")}
    (extras,) = re.findall(r'"\.\[(.+?)\]"', " ".join(arguments_of(instructions, "RUN")))
    assert set(extras.split(",")) <= set(PYPROJECT["project"]["optional-dependencies"])
    torch = dict(name.partition("=")[::2] for name in arguments_of(instructions, "ARG"))["TORCH"]
    assert f":-{torch}}}" in (REPOSITORY / "run").read_text(encoding="utf-8")
    assert arguments_of(instructions, "ENTRYPOINT") == ['["tini", "--", "penstock"]']
    (user,) = {arguments.partition(":")[0] for arguments in arguments_of(instructions, "USER")}
    for pod in pods():
        assert pod["securityContext"]["runAsUser"] == int(user)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_break_no_rule_of_hadolint(path: Path) -> None:
    done = subprocess.run(
        [PROGRAMS / "hadolint", path], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("folder", [BASE, CUDA], ids=["base", "cuda"])
def test_pods_and_compose_run_the_images_of_this_version(folder: Path) -> None:
    built_images = {
        words[words.index("-t") + 1]
        for words in stated_commands(PAGE, "Images and Compose")
        if words[:2] == ["docker", "build"]
    }
    assert all(image.endswith(f":{__version__}") for image in built_images)
    used = {each["image"] for pod in pods(folder) for each in [*pod["containers"], *pod["initContainers"]]}
    used |= {service["image"] for service in services().values()}
    assert used <= built_images


def services() -> dict[str, dict[str, Any]]:
    (compose,) = documents(DEPLOY / "compose.yaml")
    return compose["services"]


def test_compose_fits_the_schema_of_compose() -> None:
    words = [
        PROGRAMS / "check-jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        DEPLOY / "compose.yaml",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_runs_lines_that_our_own_parser_takes() -> None:
    lines = {name: [filled(word) for word in each["command"]] for name, each in services().items()}
    assert lines["head"][0] == "serve"
    assert "--join=10.0.0.1:7700" in lines["worker"]
    for words in lines.values():
        checked(words)
    assert float(services()["head"]["stop_grace_period"].removesuffix("s")) >= END_S
    assert (DEPLOY / services()["head"]["build"]["context"]).resolve() == REPOSITORY
    assert (REPOSITORY / services()["head"]["build"]["dockerfile"]).is_file()


def filled(text: str) -> str:
    """Return a text of Compose with its variables filled in, as where only the address is set."""
    text = re.sub(r"\$\{HEAD_ADDRESS:\?[^}]*\}", "10.0.0.1", text)
    return re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", text)


# --- systemd --------------------------------------------------------------------------------------

UNITS = sorted((DEPLOY / "systemd").iterdir())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_are_understood_by_systemd(tmp_path: Path, path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("/opt/penstock/bin/penstock", str(PROGRAMS / "penstock"))
    (tmp_path / path.name).write_text(text, encoding="utf-8")
    words = ["systemd-analyze", "verify", "--man=no", str(tmp_path / path.name)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    about_it = [line for line in done.stderr.splitlines() if path.name in line]
    assert (done.returncode, about_it) == (0, [])


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_run_lines_that_our_own_parser_takes(path: Path) -> None:
    service = units(path)["Service"]
    program, *words = shlex.split(service["ExecStart"][0])
    assert program == "/opt/penstock/bin/penstock"
    checked(words)
    assert service["Type"] == ["notify"]
    assert service["KillMode"] == [{"serve": "mixed", "worker": "process"}[words[0]]]
    if words[0] == "serve":
        assert float(service["TimeoutStopSec"][0]) >= END_S


@pytest.fixture
def notified(tmp_path: Path) -> Iterator[tuple[socket.socket, dict[str, str]]]:
    """The end of a service manager, and the environment that it gives."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(60.0)
        yield receiver, {VARIABLE: str(tmp_path / "notify")}


def test_a_server_says_when_it_is_ready_answers_the_probes_and_says_that_it_stops(
    notified: tuple[socket.socket, dict[str, str]],
) -> None:
    receiver, environment = notified
    with Served("demo", "--pp", "2", "--threads-per-rank", "1", env=environment) as served:
        assert receiver.recv(4096) == b"READY=1"
        assert receiver.recv(4096).startswith(b"STATUS=ready in ")
        head = container(pods()[0])
        for name in ("startup", "readiness", "liveness"):
            assert served.get(head[f"{name}Probe"]["httpGet"]["path"])
        test = [word.replace("127.0.0.1:8000", served.url.removeprefix("http://")) for word in healthcheck()]
        assert subprocess.run([sys.executable, *test[1:]], timeout=60, check=False).returncode == 0
        served.process.send_signal(signal.SIGTERM)
        assert receiver.recv(4096) == b"STOPPING=1"
        assert served.process.wait(60) == 0


def healthcheck() -> list[str]:
    kind, *words = services()["head"]["healthcheck"]["test"]
    assert (kind, words[0]) == ("CMD", "python")
    return words


def test_a_worker_is_ready_before_its_head_is_there(
    tmp_path: Path, notified: tuple[socket.socket, dict[str, str]]
) -> None:
    receiver, environment = notified
    group = {"LWS_LEADER_ADDRESS": "127.0.0.1", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
    words = [
        "worker",
        "--lws",
        "--state-dir",
        str(tmp_path / "state"),
        "--join-token-file",
        str(tmp_path / "t"),
    ]
    worker = subprocess.Popen(
        [PROGRAMS / "penstock", *words], env=os.environ | environment | group, stdout=subprocess.DEVNULL
    )
    try:
        assert receiver.recv(4096) == b"READY=1"
    finally:
        worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0


# --- the page -------------------------------------------------------------------------------------


def test_the_page_names_what_there_is() -> None:
    commands = [
        words
        for heading in ("Kubernetes", "Images and Compose", "systemd")
        for words in stated_commands(PAGE, heading)
    ]
    assert {words[0] for words in commands} >= {"penstock", "kubectl", "docker", "systemctl"}
    for words in commands:
        assert all(
            (REPOSITORY / word).exists()
            for word in words
            if word.startswith("deploy/") and word != "deploy/state"
        )
        if words[0] == "penstock":
            checked(words[1:])
        elif words[:2] == ["docker", "compose"]:
            assert words[-1] in services()
        elif words[0] == "systemctl":
            assert (DEPLOY / "systemd" / words[-1]).is_file()
