"""Config: what a policy file may say, and what a mistake in one is told."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import msgspec
import pytest

from rollout_sched import config
from rollout_sched.config import REGISTRY, ConfigError, load_policy, parse_policy
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.roles import (
    Admission,
    Batching,
    FleetView,
    Instance,
    Request,
    Routing,
    SessionAdmission,
)
from rollout_sched.live.live_scheduler import settings_of
from rollout_sched.live.settings import Settings
from rollout_sched.policies import batching, freshness, interruption, ordering, prediction, routing
from tests.helpers import Loads, make_request

#: The functions that a policy file can name.
REWARDED = ("rewards.use", "rewards.keep")


class Newest(Routing, msgspec.Struct, frozen=True):
    """A user's own routing: the open instance that joined last."""

    margin: Annotated[int, msgspec.Meta(ge=0)] = 3

    def load(self, instance: Instance) -> int:
        return -instance.serial

    def choose(self, request: Request, fleet: FleetView) -> Instance | None:
        return fleet.least()


class FirstOpen(Routing):
    """What the following classes answer."""

    def load(self, instance: Instance) -> int:
        return 0

    def choose(self, request: Request, fleet: FleetView) -> Instance | None:
        return fleet.least()


def at_once(self: Any, asked: Any) -> bool:
    return True


class Plain(FirstOpen):
    """A user's own class without msgspec, which needs a parameter and dice."""

    def __init__(self, weight: float, rng: Any) -> None:
        if weight > 9:
            raise ValueError("weight is too large")
        self.weight, self.rng = weight, rng


class Unresolved(FirstOpen):
    """Its annotations cannot be evaluated, as with names imported for type checkers only."""

    def __init__(self, weight: NoSuchName = 1) -> None:  # noqa: F821
        self.weight = weight


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that holds the user's classes."""
    module = ModuleType("users_own")
    module.Newest, module.Plain, module.Unresolved = Newest, Plain, Unresolved  # type: ignore
    module.number = 3.14  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_own", module)
    return "users_own"


def refusal(table: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_policy("mine.toml", table).build()
    return str(caught.value)


class TestDefaults:
    def test_an_empty_file_is_a_policy(self) -> None:
        roles = parse_policy("empty", {}).build()
        assert roles.routing == routing.LeastRequests()
        assert roles.ordering == ordering.Fifo()
        assert roles.prediction == prediction.NoPrediction()
        assert roles.batching == batching.Sync()
        assert roles.freshness == freshness.Bounded(0, "wait")
        assert roles.interruption == interruption.NoInterruption()

    def test_a_table_without_use_sets_the_default_s_parameters(self) -> None:
        roles = parse_policy("p", {"batching": {"over_prompts": 1.5}}).build()
        assert roles.batching == batching.Sync(1.5)

    def test_whole_numbers_serve_as_floats(self) -> None:
        assert (
            parse_policy("p", {"batching": {"over_prompts": 2}}).build().batching.over_prompts == 2
        )

    @pytest.mark.parametrize("role", config.REGISTRY)
    def test_every_registered_name_builds(self, role: str) -> None:
        for use in config.REGISTRY[role]:
            table = {"freshness": {"max_staleness": 1}, role: {"use": use}}
            parse_policy("p", table).build(lengths=lambda group, index: 1)

    def test_prose_is_kept(self) -> None:
        policy = parse_policy("p", {"about": "What.", "source": "Where"})
        assert (policy.about, policy.source) == ("What.", "Where")


class TestMistakes:
    @pytest.mark.parametrize(
        ("table", "path", "nearest"),
        [
            ({"routng": {}}, "routng", "routing"),
            ({"abuot": "x"}, "abuot", "about"),
            ({"batching": {"over_prompt": 2}}, "batching.over_prompt", "over_prompts"),
            ({"batching": {"uses": "sync"}}, "batching.uses", "use"),
            ({"routing": {"use": "least_request"}}, "routing.use", "least_requests"),
            (
                {"freshness": {"use": "bounded", "max_stalenes": 1}},
                "freshness.max_stalenes",
                "max_staleness",
            ),
        ],
    )
    def test_a_misspelt_word_is_told_its_neighbour(
        self, table: dict[str, Any], path: str, nearest: str
    ) -> None:
        text = refusal(table)
        assert text.startswith(f"mine.toml: {path}:")
        assert f'did you mean "{nearest}"?' in text

    def test_a_word_near_nothing_gets_the_list(self) -> None:
        text = refusal({"ordering": {"use": "xyzzy"}})
        assert "did you mean" not in text
        assert "fifo" in text

    def test_a_parameter_that_the_assembly_supplies_is_not_the_file_s(self) -> None:
        text = refusal({"routing": {"use": "random", "rng": 4}})
        assert text.startswith("mine.toml: routing.rng: unknown key")

    @pytest.mark.parametrize(
        ("table", "path"),
        [
            ({"routing": "least_tokens"}, "routing:"),
            ({"routing": {"use": 3}}, "routing.use:"),
            ({"about": 3}, "about:"),
            ({"batching": {"over_prompts": "two"}}, "batching.over_prompts = 'two':"),
            ({"batching": {"over_prompts": True}}, "batching.over_prompts = True:"),
            ({"batching": {"over_prompts": 0.9}}, "batching.over_prompts = 0.9:"),
            ({"batching": {"over_prompts": float("inf")}}, "batching.over_prompts = inf:"),
            ({"batching": {"over_prompts": float("nan")}}, "batching.over_prompts = nan:"),
            ({"freshness": {"max_staleness": -1}}, "freshness.max_staleness = -1:"),
            ({"freshness": {"max_staleness": 1.5}}, "freshness.max_staleness = 1.5:"),
            ({"freshness": {"when_stale": "panic"}}, "freshness.when_stale = 'panic':"),
            ({"prediction": {"use": "group_history", "quantile": 0}}, "prediction.quantile = 0:"),
        ],
    )
    def test_a_wrong_value_is_shown_with_its_place(self, table: dict[str, Any], path: str) -> None:
        assert refusal(table).startswith(f"mine.toml: {path}")

    def test_config_error_is_a_caller_error(self) -> None:
        assert issubclass(ConfigError, CallerError)


class TestFiles:
    def test_changed_parameters_may_follow_the_name(self) -> None:
        changed = "best_async freshness.max_staleness=4 freshness.when_stale=drop"
        policy = load_policy(changed)
        _, values = policy.roles["freshness"]
        assert (policy.name, values) == (changed, {"max_staleness": 4, "when_stale": "drop"})
        with pytest.raises(ConfigError, match="fleet: unknown key"):
            load_policy("best_async fleet.size=4")

    def test_missing_file_names_the_nearest_preset(self) -> None:
        with pytest.raises(ConfigError, match=r'tail_batch: neither.*did you mean "tail_batching"'):
            load_policy("tail_batch")

    def test_a_folder_is_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="neither a file nor"):
            load_policy(str(tmp_path))

    @pytest.mark.parametrize(
        "content",
        [
            *(b"[routing\nuse = 3", b"\xff\xfe", b"a = 1\na = 2"),
            b"a = " + b"9" * 5000,  # an int that Python does not make
            b"a = " + b"[" * 5000,
        ],
    )
    def test_bad_toml_names_the_file(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "broken.toml"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"broken\.toml: not valid TOML"):
            load_policy(str(path))

    def test_a_file_of_another_kind_is_not_read_to_its_end(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.toml"
        path.write_bytes(b"a." * 131072 + b"a = 1")
        with pytest.raises(ConfigError, match=r"trace\.toml: 262,149 bytes, but a policy has"):
            load_policy(str(path))

    def test_a_mistake_names_file_and_key(self, tmp_path: Path) -> None:
        path = tmp_path / "typo.toml"
        path.write_text('[freshness]\nuse = "bounded"\nmax_stale = 2\n')
        with pytest.raises(ConfigError, match=r"typo: freshness\.max_stale: unknown key.*max_stal"):
            load_policy(str(path))

    @pytest.mark.parametrize("key", [*(f"{role}.use" for role in REGISTRY), *REWARDED])
    def test_code_is_imported_only_if_the_user_allows_it(self, tmp_path: Path, key: str) -> None:
        room, _, entry = key.partition(".")
        path = tmp_path / "strange.toml"
        path.write_text(f'[{room}]\n{entry} = "a_strangers_module:getoutput"\n')
        with pytest.raises(ConfigError, match=rf"strange: {key}: 'a_str.*:getoutput' is code"):
            load_policy(str(path))
        if key in REWARDED:  # functions, which are imported where they are used
            assert load_policy(str(path), allow_code=True).rewards
        else:
            with pytest.raises(ConfigError, match=f"{key}: cannot import"):
                load_policy(str(path), allow_code=True)

    def test_a_file_is_named_after_its_stem(self, tmp_path: Path) -> None:
        path = tmp_path / "ours.v2.toml"
        path.write_text('about = "ours"')
        assert load_policy(str(path)).name == "ours.v2"


class TestUsersOwn:
    def test_class_by_module_and_name(self, mine: str) -> None:
        policy = parse_policy("p", {"routing": {"use": f"{mine}:Newest", "margin": 5}})
        own = policy.build().routing
        assert own == Newest(5)
        assert own.choose(make_request(), Loads(own, 3).fleet).id == "i2"

    def test_parameters_are_checked_like_ours(self, mine: str) -> None:
        table = {"use": f"{mine}:Newest"}
        assert 'did you mean "margin"' in refusal({"routing": {**table, "margn": 1}})
        assert "routing.margin = -1:" in refusal({"routing": {**table, "margin": -1}})

    def test_plain_class_gets_a_generator(self, mine: str) -> None:
        policy = parse_policy("p", {"routing": {"use": f"{mine}:Plain", "weight": 2}})
        first, again = policy.build(seed=7).routing, policy.build(seed=7).routing
        assert isinstance(first.weight, float)
        assert first.rng.random() == again.rng.random()
        assert first.rng.random() != policy.build(seed=8).routing.rng.random()

    def test_missing_parameter(self, mine: str) -> None:
        assert "mine.toml: routing.weight: missing" in refusal(
            {"routing": {"use": f"{mine}:Plain"}}
        )

    def test_constructor_error_is_reported(self, mine: str) -> None:
        text = refusal({"routing": {"use": f"{mine}:Plain", "weight": 10}})
        assert text == "mine.toml: routing: weight is too large"

    def test_annotations_that_cannot_be_evaluated_are_not_checked(self, mine: str) -> None:
        policy = parse_policy("p", {"routing": {"use": f"{mine}:Unresolved", "weight": 4}})
        assert policy.build().routing.weight == 4

    @pytest.mark.parametrize(
        ("role", "cls", "says"),
        [
            ("routing", type("Empty", (), {}), "it must inherit from Routing"),
            ("routing", lambda: None, "it must inherit from Routing"),
            ("admission", Plain, "it must inherit from Admission"),
            (
                "routing",
                type("Empty", (Routing,), {}),
                "it lacks load(instance)",
            ),
            (
                "batching",
                type("One", (Batching,), {"launch": at_once}),
                "it lacks stops_at_delivery; it lacks batch(progress)",
            ),
            ("admission", type("One", (SessionAdmission,), {"admits": at_once}), "it lacks begins"),
            (
                "routing",
                type("Long", (FirstOpen,), {"load": lambda self, instance, fleet: 0}),
                "it must have a method load(instance)",
            ),
            (
                "routing",
                type("Short", (FirstOpen,), {"load": lambda instance: 0}),
                "it must have a method load(instance)",
            ),
            (
                "routing",
                type("No", (FirstOpen,), {"load": 7}),
                "it must have a method load(instance)",
            ),
            (
                "routing",
                type("Typo", (FirstOpen,), {"weigh_tokens": False}),
                "nobody reads weigh_tokens; did you mean weighs_tokens?",
            ),
            (
                "routing",
                type("Typo", (FirstOpen,), {"keep_sessions": True}),
                "nobody reads keep_sessions; did you mean keeps_sessions?",
            ),
            (
                "routing",
                type("Asks", (FirstOpen,), {"keeps_sessions": lambda self: True}),
                "keeps_sessions must be a value or a property, not a method",
            ),
            (
                "admission",
                type("Half", (Admission,), {"admits": at_once, "begins": at_once}),
                "begins is asked only of a class that inherits from SessionAdmission",
            ),
        ],
    )
    def test_class_that_does_not_answer_its_role_is_refused(
        self, mine: str, role: str, cls: Any, says: str
    ) -> None:
        sys.modules[mine].Own = cls  # type: ignore[attr-defined]
        text = refusal({role: {"use": f"{mine}:Own"}})
        assert text.startswith(
            f"mine.toml: {role}.use: 'users_own:Own' cannot be a {role} policy: "
        )
        assert says in text

    @pytest.mark.parametrize(
        "own",
        [
            {"load": lambda self, instance, more=1: 0},
            {"load": staticmethod(lambda instance: 0)},
            {"load": lambda self, *what: 0},
            {"weighs_tokens": property(lambda self: False)},
            {"weight": 3, "loads": 4, "chosen": 5},
        ],
    )
    def test_class_that_answers_in_its_own_way_is_taken(
        self, mine: str, own: dict[str, Any]
    ) -> None:
        sys.modules[mine].Own = type("Own", (FirstOpen,), own)  # type: ignore[attr-defined]
        parse_policy("p", {"routing": {"use": f"{mine}:Own"}}).build()

    @pytest.mark.parametrize(
        ("role", "cls"),
        [(role, cls) for role, classes in REGISTRY.items() for cls in classes.values()],
    )
    def test_our_own_classes_are_taken_by_their_full_names(self, role: str, cls: type) -> None:
        parse_policy("p", {role: {"use": f"{cls.__module__}:{cls.__name__}"}})

    @pytest.mark.parametrize(
        "use",
        [
            "no_such_module:X",
            "users_own:Missing",
            "users_own:",
            ":Newest",
            "users_own:number",
            ".relative:X",
        ],
    )
    def test_import_and_call_errors_are_reported(self, mine: str, use: str) -> None:
        assert refusal({"routing": {"use": use}}).startswith("mine.toml: routing.use:")

    def test_a_module_that_breaks_while_importing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "broken_policy.py").write_text("def (")
        monkeypatch.syspath_prepend(tmp_path)
        text = refusal({"routing": {"use": "broken_policy:X"}})
        assert text.startswith("mine.toml: routing.use: cannot import 'broken_policy:X'")


class TestOracle:
    def test_without_lengths_it_is_refused(self) -> None:
        text = refusal({"prediction": {"use": "oracle"}})
        assert text.startswith("mine.toml: prediction: Oracle needs the true lengths")

    def test_with_lengths_it_knows_them(self) -> None:
        policy = parse_policy("p", {"prediction": {"use": "oracle"}})
        roles = policy.build(lengths=lambda group, index: 10 * index + len(group))
        assert roles.prediction.expect(make_request()) == 1


def test_generators_differ_by_seed_and_not_by_build() -> None:
    policy = parse_policy("p", {"routing": {"use": "random"}})

    def throws(seed: int) -> list[int]:
        rng = policy.build(seed=seed).routing.rng
        return [rng.randrange(1000) for _ in range(5)]

    assert throws(1) == throws(1)
    assert throws(1) != throws(2)


def test_scheduler_takes_version_and_batch() -> None:
    scheduler = parse_policy("p", {}).scheduler(7, version=3)
    assert (scheduler.state.progress.prompts_per_step, scheduler.state.progress.version) == (7, 3)


@pytest.mark.parametrize(
    ("table", "least"),
    [({"batching": {"use": "one_step_off"}}, 1), ({"weights": {"every": 3}}, 2)],
)
def test_a_bound_that_no_sample_could_meet_is_refused(table: dict[str, Any], least: int) -> None:
    text = rf"mine: freshness.max_staleness: .* allow at least {least}"
    with pytest.raises(ConfigError, match=text):
        parse_policy("mine", table).build()
    parse_policy("mine", {**table, "freshness": {"max_staleness": least}}).build()


class TestLive:
    """The [live] table: the settings of the driver, which know their own names and bounds."""

    @pytest.mark.parametrize(
        ("table", "says"),
        [
            ({"pol_s": 1.0}, 'mine: live.pol_s: unknown key; did you mean "poll_s"?'),
            ({"poll_s": 0}, "mine: live.poll_s = 0: Expected `float` > 0"),
            ({"poll_s": "1"}, "mine: live.poll_s = '1': Expected `float`"),
            ({"poll_s": float("inf")}, "mine: live.poll_s = inf: expected a finite number"),
            ({"misses": 1.5}, "mine: live.misses = 1.5: Expected `int`"),
        ],
    )
    def test_invalid_settings_are_named(self, table: dict[str, Any], says: str) -> None:
        policy = parse_policy("mine", {"live": table})
        with pytest.raises(ConfigError, match="mine: live") as error:
            settings_of(policy)
        assert str(error.value).startswith(says)

    def test_settings_must_be_a_table(self) -> None:
        with pytest.raises(ConfigError, match="mine: live: expected a table"):
            parse_policy("mine", {"live": 7})

    def test_explicit_settings_win(self) -> None:
        policy = parse_policy("mine", {"live": {"poll_s": 7, "misses": 9}})
        assert settings_of(policy) == Settings(poll_s=7.0, misses=9)
        assert settings_of(policy, {"misses": 2}) == Settings(poll_s=7.0, misses=2)
        assert settings_of(parse_policy("mine", {})) == Settings()
