"""A folder, hub id or .gguf file → model and tokenizer, with errors that people understand."""

from __future__ import annotations

import contextlib
import io
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaledot import ScaledotError

SAMPLE = Path(__file__).parent / "sample"
EMBEDDED = "embedded sample"
"""What the model there is called."""
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, its tokenizer, a short name, and what is worth a note.

    predictor: the model with the head that names the next token, `model` inside it; None where it
    was not asked for or is not there. embedded: whether it is the sample.
    """

    model: Any
    tokenizer: Any
    name: str
    notes: tuple[str, ...] = ()
    predictor: Any = None
    embedded: bool = False


def sample_text() -> str:
    """The text that comes with the embedded model; the model never trained on it."""
    return (SAMPLE / "text.txt").read_text(encoding="utf-8")


def load(
    source: str | None = None,
    *,
    tokenizer: str | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    predicts: bool = False,
) -> Loaded:
    """Load a model without its head and its tokenizer; None is the embedded sample.

    predicts: with the head for the next token too, where its weights are a causal model's.
    Weights come from safetensors or GGUF. allow_pickle also reads pickles, which can run code;
    trust_remote_code runs the code that a model repository brings.

    Raises: ScaledotError, one line: what was wrong and what to do.
    """
    transformers = _transformers()
    _check_device(device)
    if dtype not in DTYPES:
        raise ScaledotError(f"unknown dtype {dtype!r}: pass one of {', '.join(DTYPES)}")
    where = Path(source) if source is not None else SAMPLE
    name = EMBEDDED if source is None else where.name or str(where.resolve().name)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if where.suffix.lower() == ".gguf":
        _check_gguf(where)
        repo, options["gguf_file"] = str(where.parent), where.name
    elif where.is_dir():
        repo = str(where)
        _check_folder(where, allow_pickle)
    elif where.is_file():
        raise ScaledotError(
            f"{source} is a file: pass the model's folder, a hub id, a .gguf file "
            "or a saved audit.json"
        )
    else:
        repo = str(source)
        _check_hub(repo)
    with _quiet(transformers), _explain(str(source)):
        causal = predicts and _predicts(transformers, repo, options)
        kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
        model, info = kind.from_pretrained(
            repo,
            dtype=dtype,
            output_loading_info=True,
            **options,
            **({} if allow_pickle or "gguf_file" in options else {"use_safetensors": True}),
        )
        model = model.to(device).eval()
    words = _load_tokenizer(transformers, tokenizer or repo, name, options, tokenizer is None)
    predictor = model if causal and _is_whole(model, info) else None
    model = model.base_model if causal else model
    return Loaded(model, words, name, _missing(info), predictor, source is None)


def _predicts(transformers: Any, repo: str, options: dict[str, Any]) -> bool:
    """Whether the weights are those of a causal model with its head. A GGUF file's always are."""
    config = transformers.AutoConfig.from_pretrained(repo, **options)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    named = getattr(config, "architectures", None) or ()
    heads = ("ForCausalLM", "LMHeadModel")
    return any(x.endswith(heads) for x in named) or (not named and "gguf_file" in options)


def _is_whole(model: Any, info: dict[str, Any]) -> bool:
    """Whether the head for the next token was in the file, or is tied to what was."""
    prefix = f"{model.base_model_prefix}."
    return all(str(name).startswith(prefix) for name in info.get("missing_keys", ()))


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ScaledotError('transformers is not installed: pip install "scaledot[hf]"') from None
    return transformers


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ScaledotError(f"no device {device!r} here: pass cpu, cuda, cuda:0 or mps") from None


def _check_hub(name: str) -> None:
    """Ask for a hub id once: loading would try for half a minute before it gave up."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    absent = ScaledotError(f"no model at '{name}': no such folder, and not cached as a hub id")
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
    except HFValidationError:
        raise absent from None
    if constants.HF_HUB_OFFLINE:
        raise absent
    try:
        HfApi().model_info(name, timeout=10)
    except Exception:  # not there, private, or no network: all end here
        raise absent from None


def _check_folder(folder: Path, allow_pickle: bool) -> None:
    if not (folder / "config.json").is_file():
        raise ScaledotError(f"no config.json in '{folder}': not a Hugging Face model folder")
    weights = sorted(folder.glob("*.safetensors"))
    for file in weights:
        _check_safetensors(file)
    pickles = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pth"))
    if not weights and pickles and not allow_pickle:
        name = next(
            (p.name for p in pickles if p.name.startswith("pytorch_model")), pickles[0].name
        )
        raise ScaledotError(
            f"{name} is a pickle and can run code: convert to safetensors, "
            "or --allow-pickle if you trust it"
        )
    if not weights and not pickles:
        raise ScaledotError(f"no weights in '{folder}': model.safetensors is missing")


def _check_safetensors(file: Path) -> None:
    """Compare a file's length with what its header promises."""
    size = file.stat().st_size
    with file.open("rb") as f:
        head = f.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        try:
            header = json.loads(f.read(length)) if 0 < length <= size else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise ScaledotError(f"{file.name} is not a safetensors file; fetch it again")
    ends = [x["data_offsets"][1] for name, x in header.items() if name != "__metadata__"]
    full = 8 + length + max(ends, default=0)
    if size < full:
        raise ScaledotError(
            f"weights cut short: {file.name} has {size:,} of {full:,} bytes; fetch it again"
        )


def _check_gguf(file: Path) -> None:
    if not file.is_file():
        raise ScaledotError(f"no file '{file}'")
    try:
        import accelerate  # noqa: F401
        import gguf
    except ImportError as error:
        raise ScaledotError(
            f'{error.name} is not installed, .gguf files need it: pip install "scaledot[hf]"'
        ) from None
    try:
        gguf.GGUFReader(file)
    except Exception as error:  # the reader raises whatever its parsing trips over
        raise ScaledotError(
            f"cannot read {file.name}: not a whole GGUF file ({_line(error)})"
        ) from None


def _load_tokenizer(
    transformers: Any, where: str, name: str, options: dict[str, Any], own: bool
) -> Any:
    if not own:
        options = {k: v for k, v in options.items() if k != "gguf_file"}
    missing = ScaledotError(
        f"no tokenizer in '{name if own else where}': add tokenizer.json or pass --tokenizer FOLDER"
    )
    if Path(where).is_dir() and "gguf_file" not in options:
        files = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
        there = [f for f in files if (Path(where) / f).is_file()]
        if not there and not list(Path(where).glob("*.model")):
            raise missing
    with _quiet(transformers):
        try:
            return transformers.AutoTokenizer.from_pretrained(where, **options)
        except Exception as error:
            if isinstance(error, ImportError):
                raise ScaledotError(f"the tokenizer of '{name}' needs: {_line(error)}") from None
            raise missing from None


@contextlib.contextmanager
def _explain(source: str) -> Iterator[None]:
    """Turn what transformers raises into one line that says what to do."""
    try:
        yield
    except ScaledotError:
        raise
    except Exception as error:
        text = str(error)
        kind = _architecture(source, text)
        if kind:
            raise ScaledotError(
                f"unknown architecture '{kind}' in config.json; its own code stays off without "
                "--trust-remote-code, which runs it"
            ) from None
        if "does not appear to have a file named" in text and "safetensors" in text:
            raise ScaledotError(
                f"'{source}' has no safetensors weights: convert them, or --allow-pickle if you "
                "trust it: a pickle can run code"
            ) from None
        if not Path(source).exists():
            raise ScaledotError(
                f"no model at '{source}': no such folder, and not cached as a hub id"
            ) from None
        raise ScaledotError(f"cannot load '{source}': {_line(error)}") from None


def _architecture(source: str, text: str) -> str | None:
    """The model type that transformers does not know, if that is what went wrong."""
    if not any(
        sign in text
        for sign in ("does not recognize this architecture", "trust_remote_code", "model type")
    ):
        return None
    try:
        config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
        return str(config.get("model_type") or (config.get("architectures") or ["?"])[0])
    except (OSError, ValueError):
        return "?"


def _missing(info: dict[str, Any]) -> tuple[str, ...]:
    """Tensors that the file lacks are random: refuse where that touches attention, else say so."""
    missing = sorted(str(name) for name in info.get("missing_keys", ()))
    attention = [n for n in missing if any(w in n.lower() for w in ("attn", "attention", "query"))]
    if attention:
        raise ScaledotError(
            f"{len(missing)} tensors are missing from the weights, {attention[0]} among them: "
            "the model would attend at random"
        )
    if not missing:
        return ()
    return (f"{len(missing)} tensors are not in the file and are random: {', '.join(missing[:3])}",)


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep loading reports and bars off the screen: what matters is said in `Loaded.notes`."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
