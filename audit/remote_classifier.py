"""Classifiers behind HTTP, by queries alone.

Two protocols:

    kserve-v2   GET  {url}/v2/models/{model}         what the model takes and gives, checked when it is opened
                POST {url}/v2/models/{model}/infer   one FP32 input [B, 3, H, W], normalised; one output [B, classes]
    json        POST {url}  {"images": [PNG in base64, ...]}  →  {"probabilities": [[...], ...]} or {"logits": ...}
                The server resizes and normalises; a PNG has 8 bits per channel. "model_version" may be added.

An endpoint's file, as `audit.sources` reads it:

    url: https://models.example
    protocol: kserve-v2
    model: portraits
    labels: [dark, blond]
    size: 64
    mean: [0.5, 0.5, 0.5]
    std: [0.5, 0.5, 0.5]
    output: logits
    token_env: MODELS_TOKEN

What is asked of the network is narrow on purpose: no redirects, no proxies, nothing from the environment but the token
that is named, JSON only, within limits of time and size. A host is looked up once per request; all its addresses are
checked, and one of those that were checked is connected to, so that a name cannot change between check and use.

A remote model can be exchanged behind its address. Its hash covers the settings and the version it reports, and an
answer with another version is an error; a server that reports none, or does not change it, is taken at its word.

Shapes: images [B, 3, H, W] in [0, 1] of any size, logits [B, classes].
"""

import base64
import email.utils
import hashlib
import http.client
import io
import ipaddress
import json
import os
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import SplitResult, quote, urlsplit

import numpy as np
import torch
from PIL import Image
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from audit.classifier import ClassifierSettings, Output, QueriedClassifier, first_line
from engine.errors import ClassifierError

EXCERPT_BYTES = 2048
EXCERPT_LENGTH = 160
CHUNK = 2**16
FIRST_BACK_OFF = 0.25
MAX_BACK_OFF = 15.0
NAT64 = ipaddress.ip_network("64:ff9b::/96")
FLOATS = frozenset({"FP16", "FP32", "FP64", "BF16"})

Seconds = Annotated[float, Field(gt=0, le=3600)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class RemoteEndpoint(ClassifierSettings):
    """Where a remote classifier is, how it is asked, and what belongs to it."""

    url: str = Field(max_length=2000)
    protocol: Literal["kserve-v2", "json"]
    model: Name | None = None
    version: Name | None = None
    """A version of the model to ask for; without it the server chooses."""
    batch: int = Field(default=8, ge=1, le=1024)
    timeout: Seconds = 30.0
    """Seconds for one attempt, from the look-up of the host to the last byte."""
    total_timeout: Seconds = 120.0
    """Seconds for one batch with all attempts and the waits between them."""
    retries: int = Field(default=3, ge=0, le=20)
    max_response_bytes: int = Field(default=8 * 2**20, ge=1024, le=2**30)
    token_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")
    """The environment variable that holds a bearer token; the token itself never stands in a file."""
    ca_file: Path | None = None
    """Certificates to trust in place of the system's."""
    allowed_hosts: tuple[Name, ...] = ()
    """Hosts, or host:port, that may be asked; empty means any public host."""
    allow_private: bool = False
    """Whether hosts that `allowed_hosts` names may have private, loopback or link-local addresses."""

    @field_validator("url")
    @classmethod
    def _plain_url(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError:
            raise ValueError("it is no address") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("it has to begin with http:// or https:// and name a host")
        if "@" in parts.netloc:
            raise ValueError("it must not hold a user or password; name an environment variable in token_env")
        if parts.query or parts.fragment or not re.fullmatch(r"[!-~]+", url):
            raise ValueError("it must not hold a query, a fragment, blanks or letters outside ASCII")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _fits_its_protocol(self) -> Self:
        if self.protocol == "kserve-v2":
            for name in ("model", "size", "mean", "std"):
                if getattr(self, name) is None:
                    raise ValueError(f"{name} is missing; the protocol kserve-v2 needs it")
        elif self.mean is not None or self.model is not None or self.version is not None:
            raise ValueError("model, version, mean and std belong to the server in the protocol json; leave them out")
        return self

    @property
    def parts(self) -> SplitResult:
        """The address, taken apart."""
        return urlsplit(self.url)

    @property
    def host(self) -> str:
        """The host as it is compared: lower case, without a last dot."""
        return (self.parts.hostname or "").rstrip(".")

    @property
    def port(self) -> int:
        """The port, by default that of the scheme."""
        return self.parts.port or (443 if self.parts.scheme == "https" else 80)

    @property
    def named(self) -> bool:
        """Whether the allow-list names the host."""
        return bool({self.host, f"{self.host}:{self.port}"} & {name.lower().rstrip(".") for name in self.allowed_hosts})

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that decide an answer: not the limits, the token or the allow-list."""
        keys = {"url", "protocol", "model", "version", "labels", "size", "mean", "std", "resample", "output"}
        return self.model_dump(mode="json", include=keys)


class RemoteClassifier(QueriedClassifier):
    """A classifier at an HTTP endpoint; opening it asks what it is and for one answer.

    `allowed_hosts` and `allow_private` are the operator's word and take the place of what the endpoint says of itself.
    """

    def __init__(
        self,
        endpoint: RemoteEndpoint,
        *,
        allowed_hosts: Sequence[str] | None = None,
        allow_private: bool | None = None,
    ) -> None:
        policy = {"allowed_hosts": allowed_hosts, "allow_private": allow_private}
        stated = {name: value for name, value in policy.items() if value is not None}
        self.endpoint = RemoteEndpoint(**{**endpoint.model_dump(), **stated})
        self._http = JsonOverHttp(self.endpoint)
        self._version: str | None = None
        self._asked = False
        self._facts: dict[str, Any] = {}
        self._input = self._output = ""
        batch = self._read_metadata() if endpoint.protocol == "kserve-v2" else None
        super().__init__(self.endpoint, batch or self.endpoint.batch, fixed_batch=batch is not None)
        self._probe()

    @property
    def content_hash(self) -> str:
        """SHA-256 over the settings and what the server says of the model: its description and its version."""
        facts = [self.endpoint.identity, self._facts, self._version]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _ask(self, images: Tensor) -> tuple[Tensor, Output]:
        if self.endpoint.protocol == "kserve-v2":
            return self._infer(self.endpoint.prepare(images)), self.endpoint.output
        return self._post_pictures(images)

    # kserve-v2

    @property
    def _model_path(self) -> str:
        path = f"/v2/models/{quote(self.endpoint.model or '', safe='')}"
        return path if self.endpoint.version is None else f"{path}/versions/{quote(self.endpoint.version, safe='')}"

    def _read_metadata(self) -> int | None:
        """The number of images that the model insists on, or None; its description has to fit the settings."""
        facts = self._http.ask("GET", self._model_path)
        image, answer = (_only(facts, kind) for kind in ("inputs", "outputs"))
        if image.get("datatype") != "FP32":
            raise ClassifierError(f"The remote model takes {image.get('datatype')!r:.40}; it has to take FP32.")
        if answer.get("datatype") not in FLOATS:
            raise ClassifierError(f"The remote model gives {answer.get('datatype')!r:.40}; it has to give floats.")
        taken, given = _dims(image.get("shape")), _dims(answer.get("shape"))
        wanted = (3, *(self.endpoint.size or ()))
        if len(taken) != 4 or any(dim not in (-1, want) for dim, want in zip(taken[1:], wanted, strict=True)):
            raise ClassifierError(f"The remote model takes {taken}; the settings say {[-1, *wanted]}.")
        if len(given) != 2 or given[1] not in (-1, len(self.endpoint.labels)):
            raise ClassifierError(
                f"The remote model gives {given}; the settings name {len(self.endpoint.labels)} classes."
            )
        self._input, self._output = str(image.get("name")), str(answer.get("name"))
        self._facts = {key: facts.get(key) for key in ("name", "versions", "platform", "inputs", "outputs")}
        return taken[0] if taken[0] > 0 else None

    def _infer(self, x: Tensor) -> Tensor:
        body = {
            "inputs": [{"name": self._input, "shape": list(x.shape), "datatype": "FP32", "data": x.flatten().tolist()}],
            "outputs": [{"name": self._output}],
        }
        answer = self._http.ask("POST", f"{self._model_path}/infer", body)
        self._check_version(answer)
        output = _only(answer, "outputs")
        shape, numbers = _dims(output.get("shape")), _numbers(output.get("data")).flatten()
        if len(shape) != 2 or min(shape) < 0 or shape[0] * shape[1] != len(numbers):
            raise ClassifierError(f"The remote classifier answered {len(numbers)} numbers and called them {shape}.")
        return numbers.reshape(shape)

    # json

    def _post_pictures(self, images: Tensor) -> tuple[Tensor, Output]:
        pictures = [base64.b64encode(_png(image)).decode() for image in self.endpoint.prepare(images)]
        answer = self._http.ask("POST", "", {"images": pictures})
        self._check_version(answer)
        kinds: tuple[Output, ...] = ("probabilities", "logits")
        found = [kind for kind in kinds if kind in answer]
        if len(found) != 1:
            raise ClassifierError("The remote classifier has to answer with either 'probabilities' or 'logits'.")
        return _numbers(answer[found[0]]), found[0]

    def _check_version(self, answer: dict[str, Any]) -> None:
        """All answers have to come from one version of the model."""
        reported = answer.get("model_version")
        version = None if reported is None else str(reported)[:200]
        if self._asked and version != self._version:
            raise ClassifierError(
                f"The remote model changed from version {self._version!r} to {version!r} while it was asked; "
                "start again."
            )
        self._version, self._asked = version, True


class JsonOverHttp:
    """Asks one host for JSON: checked addresses, bounded time and size, retries with growing waits."""

    def __init__(self, endpoint: RemoteEndpoint) -> None:
        self.endpoint = endpoint
        self.place = f"{endpoint.parts.scheme}://{endpoint.host}:{endpoint.port}"
        self._check_host()
        self._token = self._read_token()
        self._tls = _trust(endpoint.ca_file) if endpoint.parts.scheme == "https" else None

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """The JSON object that the server answers; a ClassifierError says why there is none."""
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        end = time.monotonic() + self.endpoint.total_timeout
        for attempt in range(self.endpoint.retries + 1):
            try:
                return self._attempt(method, path, content, min(self.endpoint.timeout, end - time.monotonic()))
            except _Passing as trouble:
                wait = _back_off(attempt) if trouble.wait is None else trouble.wait
                if attempt == self.endpoint.retries or time.monotonic() + wait >= end:
                    asked = "once" if attempt == 0 else f"{attempt + 1} times"
                    raise ClassifierError(f"{self.place} {trouble} It was asked {asked}.") from None
                time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _check_host(self) -> None:
        if self.endpoint.allowed_hosts and not self.endpoint.named:
            raise ClassifierError(f"{self.endpoint.host} is not among the allowed hosts; add it to allowed_hosts.")

    def _read_token(self) -> str | None:
        name = self.endpoint.token_env
        if name is None:
            return None
        if self.endpoint.parts.scheme != "https" and not (self.endpoint.named and self.endpoint.allow_private):
            raise ClassifierError(f"A token is sent over https only; {self.place} would let others read it.")
        token = os.environ.get(name, "")
        if not re.fullmatch(r"[!-~]+", token):
            # http.client would print a token that it cannot send.
            raise ClassifierError(f"The environment variable {name} has to hold a token in one line of ASCII.")
        return token

    def _attempt(self, method: str, path: str, body: bytes | None, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        late = f"did not answer within {self.endpoint.timeout:g} s."
        connection = _Connection(self.endpoint.host, self.endpoint.port, self._addresses(seconds), end, self._tls)
        # A socket's own time-out begins anew with every byte; this one does not.
        watch = threading.Timer(max(0.0, end - time.monotonic()), connection.cut)
        watch.daemon = True
        watch.start()
        try:
            connection.request(method, self.endpoint.parts.path + path or "/", body, self._headers(body))
            with closing(connection.getresponse()) as response:
                return self._read(response, connection)
        except ssl.SSLCertVerificationError as error:
            raise ClassifierError(
                f"{self.place} shows a certificate that is not trusted: {error.verify_message}."
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            if connection.is_cut or isinstance(error, TimeoutError):
                raise _Passing(late) from None
            reason = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
            raise _Passing(f"cannot be reached: {reason}.") from None
        finally:
            watch.cancel()
            connection.close()

    def _headers(self, body: bytes | None) -> dict[str, str]:
        headers = {
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "Connection": "close",
            "User-Agent": "pfungst",
        }
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        return headers

    def _addresses(self, seconds: float) -> list[tuple[Any, ...]]:
        """The host's addresses as getaddrinfo gives them, every one of them permitted."""
        found = _look_up(self.endpoint.host, self.endpoint.port, seconds)
        addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
        if any(address.is_multicast for address in addresses):
            raise ClassifierError(f"{self.endpoint.host} has a multicast address.")
        if any(map(is_private, addresses)) and not (self.endpoint.named and self.endpoint.allow_private):
            raise ClassifierError(
                f"{self.endpoint.host} has a private, loopback or link-local address; to ask it nevertheless, name it "
                "in allowed_hosts and set allow_private."
            )
        return found

    def _read(self, response: http.client.HTTPResponse, connection: "_Connection") -> dict[str, Any]:
        """The answer's JSON, once its status, type and size are found good."""
        connection.check()
        status = response.status
        if 300 <= status < 400:
            raise ClassifierError(f"{self.place} redirects, which is not followed; name the final address.")
        if status in (408, 429) or status >= 500:
            raise _Passing(f"answered with status {status}.", _retry_after(response.getheader("Retry-After")))
        if status != 200:
            excerpt = self._excerpt(response.read(EXCERPT_BYTES))
            raise ClassifierError(f"{self.place} answered with status {status}: {excerpt}")
        kind = (response.getheader("Content-Type") or "nothing").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise ClassifierError(f"{self.place} answered with {kind!r:.60} where JSON is expected.")
        if (response.getheader("Content-Encoding") or "identity").lower() != "identity":
            raise ClassifierError(f"{self.place} answered compressed, which was not asked for.")
        return self._object(self._body(response, connection))

    def _body(self, response: http.client.HTTPResponse, connection: "_Connection") -> bytes:
        """The whole body, never more than the limit."""
        limit = self.endpoint.max_response_bytes
        parts: list[bytes] = []
        read = 0
        while read <= limit and (response.length or 0) <= limit - read:
            part = response.read(CHUNK)
            if not part:
                break
            parts.append(part)
            read += len(part)
        else:
            raise ClassifierError(f"{self.place} answered with more than the {limit} bytes of max_response_bytes.")
        connection.check()
        if response.length:
            raise _Passing("broke off in the middle of an answer.")
        return b"".join(parts)

    def _object(self, body: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            raise ClassifierError(f"{self.place} answered with something that is no JSON.") from None
        if not isinstance(answer, dict):
            raise ClassifierError(f"{self.place} has to answer with a JSON object.")
        return answer

    def _excerpt(self, body: bytes) -> str:
        """The beginning of an error's text in one printable line, without the token should the server echo it."""
        text = body.decode("utf-8", "replace")
        if self._token is not None:
            text = text.replace(self._token, "[token]")
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return f"{text[:EXCERPT_LENGTH]!r}." if text else "nothing more was said."


class _Passing(Exception):
    """Trouble that may pass: worth another attempt, after `wait` seconds if the server said so."""

    def __init__(self, sentence: str, wait: float | None = None) -> None:
        super().__init__(sentence)
        self.wait = wait


class _Connection(http.client.HTTPConnection):
    """A connection to one of the given addresses, under the host's own name, that can be cut from another thread."""

    def __init__(
        self, host: str, port: int, addresses: list[tuple[Any, ...]], end: float, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(host, port)
        self.default_port = 443 if tls else 80  # decides whether the Host header shows the port
        self._addresses, self._end, self._tls = addresses, end, tls
        self._channel: socket.socket | None = None
        self.is_cut = False

    def connect(self) -> None:
        """Takes the first address that answers."""
        trouble: OSError = OSError("the host has no address")
        for family, kind, protocol, _, address in self._addresses:
            channel = socket.socket(family, kind, protocol)
            channel.settimeout(max(0.01, self._end - time.monotonic()))
            try:
                channel.connect(address)
            except OSError as error:
                channel.close()
                trouble = error
                continue
            self._hold(channel)
            if self._tls is not None:
                # The handshake is a step of its own so that it, too, can be cut.
                wrapped = self._tls.wrap_socket(channel, server_hostname=self.host, do_handshake_on_connect=False)
                self._hold(wrapped)
                wrapped.do_handshake()
            return
        raise trouble

    def _hold(self, channel: socket.socket) -> None:
        self.sock = self._channel = channel
        self.check()

    def check(self) -> None:
        """Raises if the connection was cut, which otherwise reads like the end of the headers or the body."""
        if self.is_cut:
            raise TimeoutError

    def cut(self) -> None:
        """Ends whatever the connection is waiting for."""
        self.is_cut = True
        if self._channel is not None:
            try:
                # TLS would say goodbye first and wait for the answer.
                socket.socket.shutdown(self._channel, socket.SHUT_RDWR)
            except OSError:
                return

    def close(self) -> None:
        """Closes the socket, a half-open one too."""
        super().close()
        if self._channel is not None:
            self._channel.close()


def is_private(address: Address) -> bool:
    """Whether an address is not of the public internet, by itself or by an IPv4 address inside it."""
    if isinstance(address, ipaddress.IPv4Address):
        return not address.is_global
    inner: list[ipaddress.IPv4Address | None] = [address.ipv4_mapped, address.sixtofour]
    inner += list(address.teredo or ())
    if address in NAT64:
        inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return not address.is_global or any(part is not None and not part.is_global for part in inner)


def _look_up(host: str, port: int, seconds: float) -> list[tuple[Any, ...]]:
    """getaddrinfo with a time limit of our own: it has none."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    if not found:
        raise _Passing(f"was not found within {seconds:.2g} s.")
    if isinstance(found[0], Exception):
        raise _Passing("has a host name that is not known.")
    return list(found[0])


def _trust(ca_file: Path | None) -> ssl.SSLContext:
    """TLS 1.2 or later with certificates checked; the environment has no say in whom to trust."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    paths = ssl.get_default_verify_paths()
    if ca_file is None:
        file = paths.openssl_cafile if os.path.isfile(paths.openssl_cafile) else None
        folder = paths.openssl_capath if os.path.isdir(paths.openssl_capath) else None
        if file is None and folder is None:
            raise ClassifierError("This system has no certificates to trust; name a file of them in ca_file.")
        context.load_verify_locations(file, folder)
        return context
    try:
        context.load_verify_locations(ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ClassifierError(f"The certificates in {ca_file} cannot be read: {first_line(error)}") from None
    return context


def _back_off(attempt: int) -> float:
    """Seconds to wait: doubled with each attempt, with jitter so that many clients do not return at once."""
    return min(MAX_BACK_OFF, FIRST_BACK_OFF * 2**attempt) * random.uniform(0.5, 1.0)


def _retry_after(header: str | None) -> float | None:
    """Seconds that a server asks to wait: a number, or a date."""
    if header is None:
        return None
    if re.fullmatch(r"\d{1,9}", header.strip()):
        return float(header)
    try:
        moment = email.utils.parsedate_to_datetime(header)
    except (ValueError, TypeError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())


def _only(answer: dict[str, Any], kind: str) -> dict[str, Any]:
    """The one input or output of a model."""
    values = answer.get(kind)
    if not isinstance(values, list) or len(values) != 1 or not isinstance(values[0], dict):
        count = len(values) if isinstance(values, list) else "no list of"
        raise ClassifierError(f"The remote model has to name one of {kind!r}; it names {count}.")
    return values[0]


def _dims(shape: Any) -> list[int]:
    """A shape as numbers; some servers write them as strings."""
    try:
        return [int(dim) for dim in shape][:16]
    except (TypeError, ValueError):
        raise ClassifierError("The remote model names a shape that is no list of numbers.") from None


def _numbers(values: Any) -> Tensor:
    """Numbers out of nested JSON lists."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ClassifierError("The remote classifier answered with something that is no table of numbers.") from None
    return torch.from_numpy(np.atleast_1d(array)).float()


def _png(image: Tensor) -> bytes:
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    with io.BytesIO() as stream:
        Image.fromarray(pixels).save(stream, format="PNG")
        return stream.getvalue()
