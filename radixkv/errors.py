"""Everything radixkv raises on purpose.

RadixKVError
|-- InvalidRequest          the caller sent something we cannot serve        -> HTTP 400
|   |-- ContextTooLong      prompt and answer exceed the model's context     -> HTTP 400
|   `-- NeverFits           the request needs more blocks than exist         -> HTTP 400
|-- InvalidConfig           a setting has a value that we do not accept
|-- UnsupportedModel        the model cannot be served exactly               (named reason)
|-- InvalidAdapter          the adapter cannot be applied exactly (named reason) -> HTTP 400
|-- NotFound                no such model, file or route                     -> HTTP 404
|   `-- AdapterNotFound     no adapter is loaded under this name             -> HTTP 404
|-- CacheBusy               the cache cannot be reset while leases live      -> HTTP 409
|-- IdentityMismatch        two sides disagree on what a block means         -> HTTP 409
|-- Overloaded              the waiting queue is full; come back later       -> HTTP 429
|-- OutOfBlocks             nothing free and nothing evictable, right now    -> HTTP 503
`-- EngineDead              the engine thread has ended; nothing is served   -> HTTP 503

A broken invariant is a bug, not one of these: it is an ``assert`` or a line from ``check()``.
"""


class RadixKVError(Exception):
    """The base of all errors that radixkv raises on purpose.

    ``status`` is the HTTP status the service answers with, ``code`` the machine-readable name and
    ``param`` the request field at fault, if one is.
    """

    status = 500
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RadixKVError):
    """The caller sent something that we cannot serve."""

    status = 400
    code = "invalid_value"


class ContextTooLong(InvalidRequest):
    """The prompt, or the prompt and what may follow it, exceeds the model's context."""

    code = "context_length_exceeded"

    def __init__(
        self, *, limit: int, prompt_tokens: int, max_tokens: int | None, param: str
    ) -> None:
        wanted = f"{prompt_tokens} tokens"
        if max_tokens is not None:
            wanted = (
                f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, "
                f"{max_tokens} in the completion)"
            )
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your "
            f"{'messages' if param == 'messages' else 'prompt'} resulted in {wanted}. "
            "Please reduce the length of the input or of the completion.",
            param=param,
        )
        self.limit, self.prompt_tokens, self.max_tokens = limit, prompt_tokens, max_tokens


class NeverFits(InvalidRequest):
    """The request needs more KV blocks than the pool has, so waiting would not help."""

    code = "kv_capacity_exceeded"

    def __init__(self, *, need_blocks: int, capacity_blocks: int) -> None:
        super().__init__(
            f"this request needs {need_blocks} KV blocks and the server has {capacity_blocks}: "
            "shorten the prompt, lower max_tokens or n, or start the server with more --kv-memory"
        )
        self.need_blocks, self.capacity_blocks = need_blocks, capacity_blocks


class InvalidConfig(RadixKVError):
    """A setting has a value that we do not accept; the message names both."""


class UnsupportedModel(RadixKVError):
    """The model cannot be served with exact results; the message says why."""

    status = 400
    code = "unsupported_model"


class InvalidAdapter(RadixKVError):
    """The adapter cannot be read, or not be applied exactly; the message says why."""

    status = 400
    code = "invalid_adapter"


class NotFound(RadixKVError):
    """No such model, file or route."""

    status = 404
    code = "not_found"


class AdapterNotFound(NotFound):
    """No adapter is loaded under this name."""

    code = "model_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"There is no adapter {name[:200]!r} here.", param="model")


class CacheBusy(RadixKVError):
    """The cache cannot be reset now, because running requests hold its blocks."""

    status = 409
    code = "cache_busy"


class IdentityMismatch(RadixKVError):
    """Two sides disagree on what a block means."""

    status = 409
    code = "identity_mismatch"


class Overloaded(RadixKVError):
    """The waiting queue is full. ``retry_after_s`` is a guess at when it will not be."""

    status = 429
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OutOfBlocks(RadixKVError):
    """Nothing is free and nothing is evictable, right now."""

    status = 503
    code = "out_of_blocks"

    def __init__(self, need: int, free: int, evictable: int) -> None:
        super().__init__(f"need {need} blocks: {free} free, {evictable} evictable")
        self.need, self.free, self.evictable = need, free, evictable


class EngineDead(RadixKVError):
    """The engine thread has ended, so nothing can be served until a restart."""

    status = 503
    code = "engine_dead"
