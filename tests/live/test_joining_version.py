"""With which version an instance joins, and what is said where it may not."""

from __future__ import annotations

import logging

import pytest

from rollout_sched.live.instances.admission import JoiningVersion, JoinsLater, VersionRefused


def settle(
    instance: JoiningVersion,
    told: int | None,
    newest: int,
    *,
    follows: bool = False,
    can_load: bool = False,
) -> int:
    return instance.settle(told, newest, follows=follows, can_load=can_load)


class TestItTells:
    def test_the_trainers_version(self) -> None:
        assert settle(JoiningVersion("i0", 4), 4, 4) == 4

    def test_a_newer_one_is_refused_with_the_remedy(self) -> None:
        """A trainer that starts anew before instances that another run has trained."""
        with pytest.raises(VersionRefused) as refused:
            settle(JoiningVersion("i0", 0), 4, 0)
        text = str(refused.value)
        assert "version 4, but the trainer is at 0" in text
        for remedy in ("--start-version 4", "version=4", "--start-version auto", 'version="auto"'):
            assert remedy in text

    def test_a_newer_one_is_the_trainers_where_that_is_said(self) -> None:
        assert settle(JoiningVersion("i0", 0), 4, 0, follows=True) == 4

    def test_an_older_one_is_loaded_first(self) -> None:
        assert settle(JoiningVersion("i0", 0), 2, 5, can_load=True) == 2

    @pytest.mark.parametrize("follows", [False, True])
    def test_an_older_one_waits_where_nobody_said_how_to_load(self, follows: bool) -> None:
        with pytest.raises(
            JoinsLater, match=r"version 2, the trainer is at 5.*/weight_info reports 5"
        ):
            settle(JoiningVersion("i0", 0), 2, 5, follows=follows)


class TestItDoesNotTell:
    def test_it_has_the_trainers_first_weights(self, caplog: pytest.LogCaptureFixture) -> None:
        instance = JoiningVersion("i0", 4)
        with caplog.at_level(logging.WARNING):
            assert settle(instance, None, 4) == settle(instance, None, 4) == 4
        (said,) = caplog.messages
        assert "i0 does not report" in said
        assert "assuming 4" in said

    def test_nothing_trained_is_no_reason_to_warn(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            assert settle(JoiningVersion("i0", 0), None, 0) == 0
        assert caplog.messages == []

    def test_a_late_one_is_loaded_first_or_waits(self) -> None:
        assert settle(JoiningVersion("i0", 4), None, 6, can_load=True) == 4
        with pytest.raises(JoinsLater, match="version 4, the trainer is at 6"):
            settle(JoiningVersion("i0", 4), None, 6)

    def test_back_from_the_dead_it_has_the_weights_of_its_start(self) -> None:
        instance = JoiningVersion("i0", 0)
        assert settle(instance, 0, 0) == 0
        assert settle(instance, None, 0) == 0
        with pytest.raises(JoinsLater, match="version 0, the trainer is at 1"):
            settle(instance, None, 1)

    def test_what_those_are_may_be_anybodys_guess(self) -> None:
        """It had version 4 when we first saw it, and not from its start."""
        instance = JoiningVersion("i0", 4)
        assert settle(instance, 4, 4) == 4
        with pytest.raises(JoinsLater, match="unknown version"):
            settle(instance, None, 4)
        assert settle(instance, 4, 4) == 4, "somebody has labelled it"
        assert settle(instance, None, 5, can_load=True) < 5, "it is loaded before it serves"
