# docker build -t vcsd . && docker run --rm vcsd run
# Drives that outlive a container: docker run --rm -v vcsd:/data vcsd drive create csd0
FROM python:3.12-slim

RUN apt-get -qq update \
    && apt-get -qq install --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

COPY . /src
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c /src/constraints.txt '/src[endpoint,metrics]' \
    && rm -rf /src

ENV VCSD_HOME=/data
RUN useradd --create-home vcsd && install -d -o vcsd /data
USER vcsd
WORKDIR /home/vcsd
VOLUME /data

ENTRYPOINT ["vcsd"]
CMD ["--help"]
