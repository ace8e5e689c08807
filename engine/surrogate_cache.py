"""Distilled surrogates on disk, keyed by the content of classifier, images and recipe; altered ones are made anew."""

import copy
import hashlib
import json
import logging
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from engine.rate import Rate
from engine.surrogate import (
    Agreement,
    Cancel,
    Images,
    Progress,
    Query,
    Surrogate,
    SurrogateRecipe,
    distil,
    hash_weights,
    serialise,
)
from engine.surrogate_net import SurrogateNetwork

log = logging.getLogger(__name__)

CACHE_FORMAT = 1


def distil_cached(
    query: Query,
    images: Images,
    recipe: SurrogateRecipe,
    *,
    classifier_hash: str,
    folder: Path | str,
    images_hash: str | None = None,
    network: nn.Module | None = None,
    query_batch: int = 64,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> Surrogate:
    """`distil`, or the stored result of the same classifier, images and recipe: then f is not asked at all.

    A stored surrogate whose hashes do not fit is distilled again. Files appear under their name only when complete.
    `images_hash` stands for the images where they are known by something better than their values.
    """
    folder = Path(folder)
    key = cache_key(classifier_hash, images_hash or hash_images(images), recipe, network)
    stored = _load(folder, key, recipe, network, device)
    if stored is not None:
        return stored
    surrogate = distil(
        query,
        images,
        recipe,
        network=network,
        query_batch=query_batch,
        device=device,
        progress=progress,
        cancel=cancel,
    )
    _store(folder, key, surrogate)
    return surrogate


def cache_key(classifier_hash: str, data_hash: str, recipe: SurrogateRecipe, network: nn.Module | None = None) -> str:
    """SHA-256 over everything a surrogate depends on."""
    start = None if network is None else [str(network), hash_weights(network)]
    return _hash_json([CACHE_FORMAT, classifier_hash, data_hash, recipe.model_dump(mode="json"), start])


def hash_images(images: Images, batch: int = 64) -> str:
    """SHA-256 over count, shape, type and values of images, however they are sliced."""
    digest = hashlib.sha256(str(len(images)).encode())
    for start in range(0, len(images), batch):
        part = images[start : start + batch].detach().cpu().contiguous()
        if start == 0:
            digest.update(f"{tuple(part.shape[1:])} {part.dtype}".encode())
        digest.update(part.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _hash_json(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _store(folder: Path, key: str, surrogate: Surrogate) -> None:
    """Writes KEY.safetensors, then KEY.json, which makes it count."""
    folder.mkdir(parents=True, exist_ok=True)
    card = {
        "format": CACHE_FORMAT,
        "key": key,
        "recipe": surrogate.recipe.model_dump(mode="json"),
        "n_classes": surrogate.n_classes,
        "agreement": asdict(surrogate.agreement),
        "queries": surrogate.queries,
        "weights_hash": surrogate.weights_hash,
    }
    card["card_hash"] = _hash_json(card)
    _write(folder / f"{key}.safetensors", serialise(surrogate.network))
    _write(folder / f"{key}.json", json.dumps(card, indent=1).encode())


def _write(path: Path, content: bytes) -> None:
    """Puts a file in place whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _load(
    folder: Path, key: str, recipe: SurrogateRecipe, network: nn.Module | None, device: torch.device | str
) -> Surrogate | None:
    """The stored surrogate, or None where there is none that can be trusted."""
    try:
        card = json.loads((folder / f"{key}.json").read_bytes())
        payload = (folder / f"{key}.safetensors").read_bytes()
    except FileNotFoundError:
        return None
    except ValueError:
        log.warning("stored surrogate %s is not readable; distilling it again", key[:12])
        return None
    try:
        promised = card.pop("card_hash")
        if _hash_json(card) != promised or hashlib.sha256(payload).hexdigest() != card["weights_hash"]:
            raise ValueError("hash mismatch")
        student = SurrogateNetwork(card["n_classes"], recipe.network) if network is None else copy.deepcopy(network)
        student.load_state_dict(safetensors.torch.load(payload))
        agreement = Agreement(**{**card["agreement"], "rate": Rate(**card["agreement"]["rate"])})
        queries = card["queries"]
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        log.warning("stored surrogate %s was altered (%s); distilling it again", key[:12], error)
        return None
    student.to(device).eval().requires_grad_(False)
    return Surrogate(student, recipe, card["n_classes"], agreement, queries, card["weights_hash"])
