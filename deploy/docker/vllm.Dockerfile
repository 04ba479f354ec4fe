# vLLM with tree attention, and its kernels compiled. Building needs no GPU:
#   python -m build --wheel
#   docker build -f deploy/docker/vllm.Dockerfile -t deft-vllm:0.3.0 .
#   docker run --gpus all --shm-size 16g -p 8000:8000 deft-vllm:0.3.0 Qwen/Qwen3-8B
FROM vllm/vllm-openai:v0.33.0

ENV PIP_BREAK_SYSTEM_PACKAGES=1
COPY dist/deft_backend-0.3.0-py3-none-any.whl /opt/deft/wheel/
RUN python3 -m pip install --no-cache-dir /opt/deft/wheel/*.whl && deft --version

# The kernels of common models: heads of one GPU as query heads/KV heads, and GPUs to compile for.
# Other models compile theirs at the first start. Build with --build-arg HEADS=… to add yours.
ARG HEADS="32/8 64/8 16/2"
ARG HEAD_DIM=128
ARG TARGETS="sm_80 sm_90"
RUN for target in $TARGETS; do \
        for heads in $HEADS; do \
            deft warm --host vllm --heads "$heads" --head-dim "$HEAD_DIM" --dtype bf16 \
                --target "$target" --out /opt/deft/kernels || exit 1; \
        done; \
    done && chmod -R a+rX /opt/deft
ENV DEFT_KERNEL_CACHE=/opt/deft/kernels

EXPOSE 8000
ENTRYPOINT ["vllm", "serve", "--attention-backend", "DEFT", "--host", "0.0.0.0", "--port", "8000"]
