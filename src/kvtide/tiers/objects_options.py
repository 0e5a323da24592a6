"""Options of the objects tier, and the store that they name.

Knows settings, credentials and time-outs. Does not know records.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import ByteSize, Field, SecretStr, StringConstraints

from kvtide.tiers.options import HIDDEN, SETTING, TierOptions, need_client, option_error
from kvtide.tiers.secrets import refuse_secret_in_url, secret_of

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file", "memory")
S3_SCHEMES = ("s3", "s3a")

VARIABLE_HINT = "give the name of an environment variable"
"""Whoever confuses the two has written the secret itself."""

_Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class ObjectsOptions(TierOptions):
    """What ``tiers.options`` may hold.

    Attributes:
        url: Bucket, and a prefix in it if that is wanted.
        endpoint: Of an S3-compatible store that is not Amazon's.
        region: Of the bucket.
        access_key_id_env: Variable of the environment that has it.
        secret_access_key_env: The same for the secret.
        secret_access_key_file: File that has it, instead of a variable.
        allow_http: Go without TLS.
        pack_bytes: Small chunks are packed into objects of so many bytes at most; the same on all servers.
        timeout_s: For each request, its retry included.
    """

    HINTS: ClassVar[Mapping[str, str]] = {
        "url": "give s3://bucket/prefix, gs://, az:// or file:///folder",
        "endpoint": "give it as https://host:port",
        "region": "give its name, such as us-east-1",
        "access_key_id_env": VARIABLE_HINT,
        "secret_access_key_env": VARIABLE_HINT,
        "secret_access_key_file": "give the path of a file",
        "allow_http": "give true or false",
        "pack_bytes": "give a size up to 1GiB, such as 8MiB, or 0: each chunk is an object",
        "timeout_s": "give seconds above 0, up to 600",
    }
    SHOWN = frozenset({"region", "allow_http", "pack_bytes", "timeout_s"})

    url: str
    endpoint: str | None = None
    region: str | None = None
    access_key_id_env: _Variable | None = None
    secret_access_key_env: _Variable | None = None
    secret_access_key_file: str | None = None
    allow_http: bool = False
    pack_bytes: ByteSize = Field(default=ByteSize(8 << 20), ge=0, le=1 << 30)
    timeout_s: float = Field(default=2.0, gt=0, le=600)

    @property
    def scheme(self) -> str:
        """Of the URL."""
        return self.url.partition(":")[0].lower()


def options_of(options: Mapping[str, Any]) -> ObjectsOptions:
    """Read what the user wrote.

    Raises:
        ConfigError: Names the option and what would do; shows no value that may be a secret.
    """
    read = ObjectsOptions.read_from(options)
    for name, url in (("url", read.url), ("endpoint", read.endpoint)):
        if url is not None:
            refuse_secret_in_url(f"{SETTING}.{name}", url)
            if "?" in url or "@" in url:  # a signature, or a key before the host
                raise option_error(name, HIDDEN, "give it without user, query and signature")
    if read.scheme not in SCHEMES or "://" not in read.url:
        raise option_error("url", read.url, read.HINTS["url"])
    if read.endpoint and not read.endpoint.startswith(("http://", "https://")):
        raise option_error("endpoint", read.endpoint, read.HINTS["endpoint"])
    if read.endpoint and read.endpoint.startswith("http://") and not read.allow_http:
        hint = f"is not encrypted: give https://, or set {SETTING}.allow_http"
        raise option_error("endpoint", read.endpoint, hint)
    _check_scheme(read)
    return read


def _check_scheme(read: ObjectsOptions) -> None:
    """Refuse what has no meaning for this kind of store, instead of leaving it aside."""
    for name in (
        "endpoint",
        "region",
        "access_key_id_env",
        "secret_access_key_env",
        "secret_access_key_file",
    ):
        if read.scheme not in S3_SCHEMES and getattr(read, name) is not None:
            hint = f"is for s3://; with {read.scheme}:// the environment says that"
            raise option_error(name, getattr(read, name), hint)
    secret = read.secret_access_key_env or read.secret_access_key_file
    if bool(read.access_key_id_env) != bool(secret):
        missing = "secret_access_key_env" if read.access_key_id_env else "access_key_id_env"
        raise option_error(missing, None, "give both key and secret, or neither")


def need_obstore() -> None:
    """See that obstore is installed.

    Raises:
        ConfigError: It is not.
    """
    need_client("objects", "obstore.store", "obstore")


def store_of(options: ObjectsOptions) -> "ObjectStore":
    """Make the client that the options name; asks the network for nothing.

    Raises:
        ConfigError: obstore is not installed or will not have it, or a secret is not where it should be.
    """
    need_obstore()
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    key = secret_of(f"{SETTING}.access_key_id", options.access_key_id_env, None)
    secret = secret_of(
        f"{SETTING}.secret_access_key", options.secret_access_key_env, options.secret_access_key_file
    )
    try:
        if options.scheme == "memory":
            return from_url(options.url)
        if options.scheme == "file":
            return from_url(options.url, mkdir=True)
        client, retries = _client(options), _retries(options)
        if options.scheme in S3_SCHEMES:
            config = _config(options, key, secret)
            return from_url(options.url, config=config, client_options=client, retry_config=retries)
        return from_url(options.url, client_options=client, retry_config=retries)
    except (BaseError, ValueError, OSError) as error:
        # Its message may quote what it was given.
        raise option_error("url", options.url, f"obstore refuses it: {type(error).__name__}") from None


def _config(options: ObjectsOptions, key: SecretStr | None, secret: SecretStr | None) -> "S3Config":
    """What the environment would say otherwise."""
    config: S3Config = {}
    if options.endpoint:
        config["endpoint"] = options.endpoint
    if options.region:
        config["region"] = options.region
    if key is not None and secret is not None:
        config["access_key_id"] = key.get_secret_value()
        config["secret_access_key"] = secret.get_secret_value()
    return config


def _client(options: ObjectsOptions) -> "ClientConfig":
    return {
        "allow_http": options.allow_http,
        "timeout": timedelta(seconds=0.8 * options.timeout_s),
        "connect_timeout": timedelta(seconds=min(1.0, options.timeout_s / 2)),
    }


def _retries(options: ObjectsOptions) -> "RetryConfig":
    """One, for a connection that was closed while it lay idle, or a moment's overload.

    A try that used up its time is not repeated, so that both end within ``timeout_s``; by itself obstore
    goes on for three minutes.
    """
    return {
        "max_retries": 1,
        "retry_timeout": timedelta(seconds=0.15 * options.timeout_s),
        "backoff": {
            "init_backoff": timedelta(seconds=0.02 * options.timeout_s),
            "max_backoff": timedelta(seconds=0.05 * options.timeout_s),
            "base": 2,
        },
    }
