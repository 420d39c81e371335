# docker build -t fedjax_pfl .                                for CPUs
# docker build -t fedjax_pfl --build-arg JAX_EXTRA=cuda13 .   for NVIDIA GPUs; or cuda12
# docker run --rm -v "$PWD/runs:/home/pfl/runs" fedjax_pfl pfedla   with --gpus=all for GPUs
FROM python:3.12-slim
# Extra of jax. The CUDA wheels contain CUDA and cuDNN; the host needs the driver and NVIDIA's container toolkit.
ARG JAX_EXTRA=""
COPY setup.cfg pyproject.toml README.md LICENSE /source/
COPY fedjax_pfl /source/fedjax_pfl
RUN pip install --no-cache-dir "/source" "jax${JAX_EXTRA:+[$JAX_EXTRA]}>=0.10" \
    && rm -r /source \
    && useradd --create-home --uid 1000 pfl \
    && install --directory --owner=pfl /home/pfl/runs
USER pfl
WORKDIR /home/pfl
ENTRYPOINT ["fedjax-pfl"]
CMD ["--help"]
