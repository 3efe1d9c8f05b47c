# The coordinator, the participant SDK and the examples in one image; it runs as an ordinary user.

FROM python:3.13-slim AS build
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# Every wheel is checked against the lock's hashes; what follows installs from these wheels only.
COPY requirements.lock ./
RUN pip download --no-cache-dir --require-hashes --only-binary=:all: --dest /wheels -r requirements.lock

COPY pyproject.toml README.md LICENSE ./
COPY coordinator coordinator
COPY participant_sdk participant_sdk
COPY protos protos
RUN pip install --no-index --find-links=/wheels hatchling \
    && pip wheel --no-index --no-deps --no-build-isolation --wheel-dir /wheels . \
    && python -m venv --without-pip /opt/tricord \
    && pip --python /opt/tricord/bin/python install --no-index --find-links=/wheels \
        'tricord[coordinator,postgres,asyncio,uvloop]'


FROM python:3.13-slim
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin tricord
COPY --from=build /opt/tricord /opt/tricord
WORKDIR /app
COPY examples examples
ENV PATH=/opt/tricord/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 7800 7801
CMD ["tricord", "serve"]
