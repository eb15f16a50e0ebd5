"""Our settings in verl's configuration: `actor_rollout_ref.rollout.custom.rollout_sched`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollout_sched.config import ConfigError
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.http.server import read_keys

#: Where verl keeps settings of others, and our table there.
WHERE = "actor_rollout_ref.rollout.custom.rollout_sched"
_TABLE = "rollout_sched"


class RoomSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which scheduler generates, and how to reach it.

    gateway           the URL of a `rollout-sched serve`; or
    ray               the name of a deployment on verl's Ray cluster (`rollout-sched ray up`);
                      with it, `gateway` is one of its fronts, for requests outside groups; or
    policy            a preset or a TOML file: the scheduler runs in verl's job, with the servers
                      that verl has started
    api_key_file      file whose first line is a client's key; "": no key is needed
    trainer_key_file  file whose first line is a trainer's key; "": the gateway is on this machine
    poll_s            seconds between two checks whether the trainer needs another batch
    """

    gateway: str = ""
    ray: str = ""
    policy: str = ""
    api_key_file: str = ""
    trainer_key_file: str = ""
    poll_s: Annotated[float, msgspec.Meta(gt=0)] = 0.5

    def __post_init__(self) -> None:
        if bool(self.gateway or self.ray) == bool(self.policy):
            raise ValueError(
                "set either `gateway` (a URL) or `ray` (the name of a deployment), or `policy` (a "
                "preset or a TOML file)"
            )

    @property
    def gateway_url(self) -> str:
        """Raises ConfigError if it is not set."""
        if not self.gateway:
            raise ConfigError(f"{WHERE}: set `gateway` to a URL: single turns need one")
        return self.gateway.rstrip("/")

    @property
    def api_key(self) -> str | None:
        """Raises ConfigError if the file cannot be read."""
        return _key_of(self.api_key_file, "api_key_file")

    @property
    def trainer_key(self) -> str | None:
        """Raises ConfigError if the file cannot be read."""
        return _key_of(self.trainer_key_file, "trainer_key_file")


def settings_of(custom: Mapping[str, Any] | None) -> RoomSettings:
    """Our table in `rollout.custom`. Raises ConfigError naming the key."""
    table = dict(custom or {}).get(_TABLE)
    if table is None:
        raise ConfigError(f"{WHERE} is missing; set its `gateway`, its `ray` or its `policy`")
    try:
        return msgspec.convert(table, RoomSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{WHERE}: {error}") from None


def _key_of(path: str, key: str) -> str | None:
    if not path:
        return None
    try:
        return read_keys(Path(path))[0]
    except CallerError as error:
        raise ConfigError(f"{WHERE}.{key}: {error}") from None
