# Terrella for Hopper GPUs (H100, H200): CUDA 13.0, Python 3.12, the versions and hashes of requirements/lock-hopper.txt.
#
#   docker build -t terrella .
#   docker run --rm --gpus all --ipc host -v "$PWD/runs:/runs" terrella train sokoban-tiny --run /runs/demo
#
# | component          | version      | run together on one H200 | run on an H100 |
# |--------------------|--------------|--------------------------|----------------|
# | torch (CUDA 13.0)  | 2.11.0       | yes                      | no             |
# | triton             | 3.6.0        | yes                      | no             |
# | megatron-core      | 0.16.1       | yes                      | no             |
# | TransformerEngine  | 2.11.0       | yes                      | no             |
# | vLLM               | 0.22.1       | yes                      | no             |
# | transformers       | 5.17         | yes                      | no             |
# | NVIDIA apex        | from source  | no                       | no             |
#
# Beside these: Ray and Playwright (both in the lock), a Chromium for web tasks, and the user side of InfiniBand (rdma-core), which NCCL loads.
#
# Not verified: the build of this image as a whole, several GPUs (NCCL), InfiniBand, apex. The lock resolves for x86_64 and aarch64.
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04

RUN apt-get update \
 && apt-get install -y --no-install-recommends git ninja-build python3 python3-dev python3-venv \
    ibverbs-providers libibverbs1 librdmacm1 rdma-core \
 && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/terrella-venv PATH=/opt/terrella-venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/terrella
COPY requirements requirements

# the whole set with hashes; stop here when torch is not the CUDA 13 build
RUN python3 -m venv "$VIRTUAL_ENV" \
 && pip install --no-deps --require-hashes -r requirements/lock-hopper.txt \
 && python -c "import torch; assert (torch.version.cuda or '').startswith('13.'), f'torch is built for CUDA {torch.version.cuda}, not 13'"
# TransformerEngine's torch binding is built against the torch above
RUN NVTE_FRAMEWORK=pytorch pip install --no-deps --no-build-isolation transformer-engine-torch==2.11.0

# web tasks: a browser where every user of the container finds it, with the libraries and fonts it needs
ENV PLAYWRIGHT_BROWSERS_PATH=/opt/browsers
RUN playwright install --with-deps chromium && chmod -R a+rX "$PLAYWRIGHT_BROWSERS_PATH" && rm -rf /var/lib/apt/lists/*

# NVIDIA apex is optional and only built from its sources: the package of that name in the index is another project.
ARG APEX_COMMIT=
RUN if [ -n "$APEX_COMMIT" ]; then \
      git clone https://github.com/NVIDIA/apex /tmp/apex && git -C /tmp/apex checkout "$APEX_COMMIT" \
      && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation /tmp/apex && rm -rf /tmp/apex; \
    fi

COPY . .
RUN pip install --no-deps --no-build-isolation . && cd / && terrella --version
WORKDIR /runs
ENTRYPOINT ["terrella"]
CMD ["--help"]
