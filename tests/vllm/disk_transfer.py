"""A weight-transfer backend for the tests: a safetensors file into a live worker.

vLLM's own backends need a GPU. vLLM finds this one as a general plugin, which a folder with this
file and the metadata of `install` on the path is.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "test_disk"


def install(folder: Path, plugin: Path = Path(__file__), name: str = NAME) -> None:
    """Make `folder` a place from which vLLM loads this plugin, or another with a `register`."""
    shutil.copy(plugin, folder)
    metadata = folder / f"{plugin.stem}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {plugin.stem}\nVersion: 1\n")
    entry = f"[vllm.general_plugins]\n{name} = {plugin.stem}:register\n"
    (metadata / "entry_points.txt").write_text(entry)


def register() -> None:
    """What vLLM calls in each of its processes."""
    from vllm.distributed.weight_transfer import base
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import reload

    @dataclass
    class Nothing(base.WeightTransferInitInfo):
        pass

    @dataclass
    class File(base.WeightTransferUpdateInfo):
        path: str

    class DiskTransfer(base.WeightTransferEngine):  # type: ignore[misc, type-arg, unused-ignore]
        init_info_cls, update_info_cls = Nothing, File

        def init_transfer_engine(self, init_info: Any) -> None: ...

        def start_weight_update(self) -> None:
            reload.initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: Any) -> None:
            # The base class waits for an accelerator, which a CPU has not.
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Any) -> None:
            from safetensors.torch import load_file

            self.model.load_weights(load_file(update_info.path).items())

        def finish_weight_update(self) -> None:
            reload.finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None: ...

    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, DiskTransfer)
