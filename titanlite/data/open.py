"""From the options of a dataset to its packed sequences."""

from titanlite.config.loader import ConfigError
from titanlite.config.schema import Training, Validation
from titanlite.data.documents import Source, load_documents, load_stream
from titanlite.data.loader import Sequences
from titanlite.data.packing import PackedSequences, ValidationSequences
from titanlite.data.streaming import StreamingSequences
from titanlite.data.token_cache import open_token_cache
from titanlite.data.tokenizer import Tokenizer


def open_sequences(
    tokenizer: Tokenizer, training: Training, validation: Validation, *, seed: int, builds_cache: bool
) -> tuple[Sequences, ValidationSequences | None, str]:
    """Open the training split and, where validation is enabled, the validation split. Also return the identity of the
    training data: equal for two runs only if their global indices name the same sequences.

    Epochs are shuffled by `seed`. The rank with `builds_cache`, one per node, builds a missing token cache. Data that
    cannot be read or is too short raises ConfigError.
    """
    source, validation_source = Source(training), _validation_source(training, validation)
    cache = {"cache_folder": training.cache_folder, "builds_cache": builds_cache}
    if training.streaming:
        dataset, column, content = load_stream(source)
        sequences: Sequences = StreamingSequences(dataset, column, source, tokenizer)
        order = f"{tokenizer.identity}/seq_len {training.seq_len}/{training.streaming_shards} streaming shards"
    else:
        fraction = 0.0 if validation_source else validation.fraction
        documents = load_documents(source)
        tokens, validation_tokens, content = open_token_cache(documents, tokenizer, fraction, **cache)
        sequences = PackedSequences(tokens, tokenizer, training, seed=seed)
        order = f"seq_len {training.seq_len}/{f'seed {seed}' if training.shuffle else 'in order'}"
    if not validation.enable:
        return sequences, None, f"{content}/{order}"
    if validation_source:
        validation_tokens, _, _ = open_token_cache(load_documents(validation_source), tokenizer, 0.0, **cache)
    if len(validation_tokens) < 2:
        problem = f"{validation_source}: has no text to validate on"
        if not validation_source:
            problem = f"validation.fraction = {validation.fraction}: selects no document of this dataset; set it "
            problem += "higher, or set validation.dataset_path (files) or validation.dataset_split (hub)"
        raise ConfigError([problem])
    return sequences, ValidationSequences(validation_tokens, tokenizer, training.seq_len), f"{content}/{order}"


def _validation_source(training: Training, validation: Validation) -> Source | None:
    """Return the dataset that the validation split is read from; None: it is a fraction of the training documents."""
    if validation.dataset_path:
        files = training.model_copy(update={"dataset_path": validation.dataset_path})
        return Source(files, path_option="validation.dataset_path")
    split = "validation" if training.dataset == "c4" else validation.dataset_split
    return Source(training.model_copy(update={"dataset_split": split})) if split else None
