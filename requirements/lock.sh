#!/usr/bin/env bash
# Writes lock-cpu.txt and lock-hopper.txt: exact versions with hashes, for Linux on x86_64 and aarch64 with Python 3.11 to 3.13. Needs uv.
# Two packages are left out and installed by a line of their own (docs/install.md): the CPU build of torch, which is not in the common
# index, and TransformerEngine's torch binding, which is built against the torch that is installed. What a lock already pins is kept where
# it still fits; delete the file to start from the newest versions.
set -euo pipefail
cd "$(dirname "$0")"

lock() {  # OUT CONSTRAINTS OPTION...
    uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
        --constraints "$2" --output-file "$1" "${@:3}"
    # the environments that pyproject.toml names are the only ones: a marker that says so again is left out
    sed -i -E "s/ ; \(python_full_version < '3.14' and platform_machine == 'aarch64' and sys_platform == 'linux'\) or \(python_full_version < '3.14' and platform_machine == 'x86_64' and sys_platform == 'linux'\)( \\\\)?$/\1/" "$1"
}

lock lock-cpu.txt constraints.txt --no-emit-package torch base.txt data.txt ray.txt video.txt web.txt
lock lock-hopper.txt constraints-h100.txt --no-emit-package transformer-engine-torch base.txt data.txt ray.txt video.txt web.txt vllm.txt te.txt
