"""Bugs of other trainers that were reported in public, and a mutant that makes the same mistake here.

    python -m verification.mutants.public_bugs              make each mistake, and run the test that must fail
    python -m verification.mutants.public_bugs --only 2972  those whose link, description or test has this text

All are silent: wrong numbers, lost data or checkpoints. Each mutant is the nearest edit here, not the other's code.

Exit status: 0 if each test passes without the mistake and fails with it.
"""

import argparse
import functools
import sys
import time
from collections.abc import Iterable
from typing import NamedTuple

from verification.mutants.__main__ import CRASHES, ROOT, first_failure, mutated_copy
from verification.mutants.table import CONTEXT, LAYOUT, LOADER, MOE, MUTANTS, PARITY, RESTORED, TRAIN, Mutant


class PublicBug(NamedTuple):
    """A bug of another program, and the same mistake here."""

    repository: str
    number: int
    """Of the issue or of the pull request that describes it."""
    state: str
    """Open, closed or merged, in the stored copy that was read (of September 2026 at the latest)."""
    what: str
    """What was wrong, in a sentence."""
    mutant: Mutant
    """Its first test is the one that must fail."""

    @property
    def url(self) -> str:
        """The address, from which GitHub leads to a pull request, too."""
        return f"https://github.com/{self.repository}/issues/{self.number}"

    @property
    def test(self) -> str:
        return self.mutant.tests


def layout(name: str) -> str:
    return f"{LAYOUT}::test_layout_matches_reference[{name}]"


def parity(name: str) -> str:
    return f"{PARITY}::test_layout_matches_reference[{name}]"


def experts(name: str) -> str:
    return f"{MOE}::test_layout_matches_reference[{name}]"


TWO_RANKS, REPLICATE = parity("2 ranks, ZeRO-3-3 accumulation steps"), parity("2 ranks, replicate-3 accumulation steps")
PIPELINE, CONTEXT_PARALLEL = layout("Interleaved1F1B 2"), layout("cp, ZeRO-2")
RESUMED = f"{TRAIN}::test_a_resumed_run_gives_bit_for_bit_the_same[1-disabled]"
AUXILIARY = f"{MOE}::test_auxiliary_losses_have_the_gradients_of_their_definition[1.0-softmax]"
ORDER_AFTER_RESUME = f"{LOADER}::test_resume_on_other_ranks_keeps_the_order[ranks_and_batches1]"


def known_mutant(what: str, test: str) -> Mutant:
    """Return the mutant of table.py with this description, and the test that must fail as its only one."""
    (mutant,) = (mutant for mutant in MUTANTS if mutant.what == what)
    return mutant._replace(tests=test)


MEAN_OF_MEANS = Mutant(
    "train_step.py", "each accumulation step of each rank divides by its own tokens: a mean of means",
    "loss_sum += self.runner.forward_backward(batch.to(self.device), valid / loss_scale)",
    "own = count_valid([batch.targets], self.device) * len(batches) * dist.get_world_size()\n"
    "            loss_sum += self.runner.forward_backward(batch.to(self.device), own / loss_scale)",
    TWO_RANKS)  # fmt: skip
SUM_OF_STEPS = Mutant(
    "train_step.py", "gradients of accumulation steps are summed as if each was a step",
    "valid / loss_scale)", "valid / len(batches) / loss_scale)", TWO_RANKS)  # fmt: skip
MICROBATCHES_SUMMED = Mutant(
    "parallel/pipeline.py", "gradients of microbatches are summed as if each was a batch",
    "return loss / self._valid", "return loss / self._valid * self.n_microbatches", PIPELINE)  # fmt: skip
NOT_DIVIDED = Mutant(
    "parallel/pipeline.py", "the loss of a microbatch is not divided by the number of tokens before the backward",
    "return loss / self._valid", "return loss", PIPELINE)  # fmt: skip
NAN_WITHOUT_TOKENS = Mutant(
    "loss.py", "a batch without a valid token has no finite loss",
    'F.cross_entropy(logits_NV, targets_N, reduction="none", ignore_index=IGNORED)',
    "F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED) * (targets_N != IGNORED)",
    "tests/test_model.py::test_a_batch_without_valid_targets_adds_nothing")  # fmt: skip
EXPERT_INPUTS = Mutant(
    "techniques/moe/parallel.py", "gradients of the experts' inputs are not summed over tensor-parallel ranks",
    "x_ND.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])",
    "x_ND.redistribute(placements=[Replicate()]).to_local()", experts("tp"))  # fmt: skip

LOSSES = [
    PublicBug(
        "huggingface/transformers", 34242, "closed",
        "The loss was averaged over the tokens of each rank and accumulation step, and these means were averaged.",
        MEAN_OF_MEANS),
    PublicBug(
        "pytorch/torchtitan", 2206, "merged",
        "Each rank and microbatch divided by its own number of valid tokens.", MEAN_OF_MEANS),
    PublicBug(
        "deepspeedai/DeepSpeed", 7773, "open",
        "Under pipeline parallelism, gradients of accumulation steps were summed, not averaged.", SUM_OF_STEPS),
    PublicBug(
        "mosaicml/composer", 3677, "merged",
        "Microbatches were weighted by all of their tokens, those without a target among them.",
        Mutant("loss.py", "tokens without a target count",
               "int((target != IGNORED).sum())", "target.numel()", TWO_RANKS)),
    PublicBug(
        "pytorch/pytorch", 144352, "closed",
        "Pipeline schedules did not divide gradients by the number of microbatches; torchtitan's loss curves hid it, "
        "as torchtitan 800 says.", MICROBATCHES_SUMMED),
    PublicBug(
        "pytorch/torchtitan", 1733, "closed",
        "A pipeline divided all accumulated gradients by the number of microbatches in every accumulation step.",
        known_mutant("gradients are divided by the microbatches", PIPELINE)),
    PublicBug(
        "pytorch/torchtitan", 2972, "open",
        "A pipeline computed gradients of the summed loss: too large by the number of valid tokens.", NOT_DIVIDED),
    PublicBug(
        "pytorch/torchtitan", 4194, "merged",
        "The same in the Forge trainer: the loss was divided after the schedule had run the backward.", NOT_DIVIDED),
    PublicBug(
        "pytorch/torchtitan", 2318, "open",
        "DDP and HSDP divided gradients by the ranks once more: a factor of 8 between their norms and FSDP's.",
        known_mutant("gradients are divided by the ranks", REPLICATE)),
    PublicBug(
        "NVIDIA-NeMo/Automodel", 3530, "merged",
        "A pipeline that initialized its stages again dropped the gradients that were accumulated so far.",
        Mutant("train_step.py", "each accumulation step begins without the gradients of those before",
               "            alive()\n", "            self.model.zero_grad()\n", TWO_RANKS)),
    PublicBug(
        "deepspeedai/DeepSpeed", 7837, "closed",
        "With ZeRO stage 0 and bfloat16, gradients were not set to zero after a step.",
        Mutant("train.py", "gradients are not set to zero after a step",
               "            optimizer.zero_grad()\n            meter.step_done()", "            meter.step_done()",
               RESUMED)),
    PublicBug(
        "karpathy/build-nanogpt", 30, "merged",
        "Gradients were not reduced over ranks in the last accumulation step, so each rank trained by itself.",
        known_mutant("replicas do not sum their gradients", REPLICATE)),
    PublicBug(
        "huggingface/picotron", 5, "merged",
        "Under 1F1B with data parallelism, a rank of the pipeline never synchronized its gradients.",
        known_mutant("replicas do not sum their gradients", REPLICATE)),
    PublicBug(
        "NVIDIA/Megatron-LM", 1764, "open",
        "Loss and gradients became NaN if all tokens of a context-parallel rank were masked.", NAN_WITHOUT_TOKENS),
    PublicBug(
        "allenai/OLMo-core", 452, "merged",
        "The loss became NaN if all instances of a rank were masked.", NAN_WITHOUT_TOKENS),
]  # fmt: skip

RANK_0_ONLY = Mutant(
    "optimizer.py", "the gradient norm has the shards of the first rank only",
    "squares += norms.square().sum() / replicas", "squares += norms.square().sum() / replicas * (dist.get_rank() == 0)",
    layout("tp 2"))  # fmt: skip
EXPERTS_OMITTED = Mutant(
    "optimizer.py", "the gradient norm omits experts",
    "if parameter.grad is not None:", "if parameter.grad is not None and parameter.dim() < 3:",
    experts("shard"))  # fmt: skip

NORMS = [
    PublicBug(
        "pytorch/torchtitan", 649, "merged",
        "Under pipeline parallelism, the gradient norm was incomplete: not summed over the stages.",
        known_mutant("the gradient norm is that of this rank's shards", PIPELINE)),
    PublicBug(
        "NVIDIA/Megatron-LM", 7452, "open",
        "Finding 8: attention sinks, sharded over tensor-parallel ranks, were in the clipping norm on one rank only.",
        RANK_0_ONLY),
    PublicBug(
        "NVIDIA/Megatron-LM", 5916, "merged",
        "With expert and tensor parallelism, the gradient norm omitted some experts.", EXPERTS_OMITTED),
    PublicBug(
        "NVIDIA-NeMo/Automodel", 3817, "open",
        "The experts' part of the gradient norm was not reduced over expert-parallel ranks, which clipped apart.",
        known_mutant("the gradient norm is that of this rank's shards", experts("tp, ep"))),
    PublicBug(
        "NVIDIA-NeMo/RL", 3788, "open",
        "Gradients that tensor-parallel ranks share were counted in the norm once for each of them.",
        known_mutant("the squares of replicated gradients are counted once for each replica", layout("tp 2"))),
    PublicBug(
        "deepspeedai/DeepSpeed", 3790, "merged",
        "A change had disabled gradient clipping with bfloat16.",
        Mutant("optimizer.py", "gradients are not clipped",
               "(max_norm / (norm + 1e-6)).clamp(max=1.0)", "(max_norm / (norm + 1e-6)).clamp(1.0, 1.0)",
               TWO_RANKS)),
]  # fmt: skip

PARALLEL = [
    PublicBug(
        "NVIDIA/Megatron-LM", 7452, "open",
        "Logits that were gathered went to the vocabulary-parallel loss: log(tp) too much, and wrong gradients.",
        Mutant("loss.py", "gathered logits are taken for a shard of the vocabulary",
               ".to_local()\n        mesh = None\n", ".to_local()\n", layout("tp, no loss parallel"))),
    PublicBug(
        "pytorch/torchtitan", 3412, "merged",
        "With the chunked loss and tensor parallelism, partial gradients of the last activations were not summed.",
        known_mutant("gradients of the last activations are not summed over the vocabulary's shards",
                     layout("chunked cross-entropy, 3 chunks, tp"))),
    PublicBug(
        "NVIDIA/Megatron-LM", 1446, "closed",
        "With tensor and sequence parallelism, gradients of the final norm differed between tensor-parallel ranks.",
        known_mutant("gradients of weights that all ranks have are not summed", experts("tp"))),
    PublicBug(
        "pytorch/torchtitan", 2387, "closed",
        "Gradients of the router, which tensor-parallel ranks share, were not summed: its copies drifted apart.",
        known_mutant("gradients of weights that all ranks have are not summed", experts("tp"))),
    PublicBug(
        "huggingface/transformers", 48205, "merged",
        "With expert parallelism, gradients of what is before the experts had each rank's own experts only.",
        known_mutant("gradients of weights that all ranks have are not summed", experts("tp, ep"))),
    PublicBug(
        "pytorch/torchtitan", 1805, "closed",
        "Under tensor parallelism, gradients of the experts' inputs were not summed over the ranks.", EXPERT_INPUTS),
    PublicBug(
        "pytorch/torchtitan", 4054, "merged",
        "The same without expert parallelism, once the layer had been written anew.", EXPERT_INPUTS),
    PublicBug(
        "NVIDIA-NeMo/Automodel", 2995, "merged",
        "Routing scores were gathered without a gradient: the router learned from the auxiliary losses only.",
        Mutant("techniques/moe/parallel.py", "scores that were sent to other ranks have no gradient",
               "d_x_MD, d_scores_M, *d_weights", "d_x_MD, torch.zeros_like(d_scores_M), *d_weights",
               experts("tp, ep"))),
    PublicBug(
        "pytorch/pytorch", 160285, "open",
        "In torchtitan, gradients of experts doubled with an expert-parallel degree of 2.",
        Mutant("techniques/moe/parallel.py", "gradients of experts are too large by the expert-parallel degree",
               "out=own_d_w)", "out=own_d_w).mul_(exchange.group.size())", experts("tp, ep"))),
    PublicBug(
        "pytorch/torchtitan", 792, "merged",
        "Pipeline stages rotated the tokens of a context-parallel rank by the angles of other positions.",
        known_mutant("positions are ignored", CONTEXT_PARALLEL)),
    PublicBug(
        "pytorch/torchtitan", 3206, "merged",
        "Context parallelism gathered keys and values along the heads, not along the sequence.",
        known_mutant("heads come back in another order", layout("ulysses 2"))),
    PublicBug(
        "NVIDIA/Megatron-LM", 1464, "closed",
        "With context parallelism, gradients of queries, keys and values were wrong.",
        known_mutant("gradients of values of other ranks are lost", CONTEXT_PARALLEL)),
    PublicBug(
        "huggingface/diffusers", 14265, "closed",
        "The backward of ring attention used the rank's own keys and values in every step of the ring.",
        Mutant("parallel/ring.py", "the backward uses a rank's own keys in every step",
               "k_step, v_step)\n            grads =", "k, v)\n            grads =", CONTEXT_PARALLEL)),
    PublicBug(
        "pytorch/torchtitan", 4801, "open",
        "The attention window of DeepSeek V4 crossed the boundaries of packed documents.",
        Mutant("parallel/tiles.py", "a window crosses the boundaries of documents",
               "for begin, end in pairwise(bounds):", "for begin, end in [(bounds[0], bounds[-1])]:",
               f"{CONTEXT}::test_tiles_cover_the_mask[2-short]")),
    PublicBug(
        "axolotl-ai-cloud/axolotl", 3796, "merged",
        "With sample packing and sdpa or eager attention, documents attended to each other.",
        Mutant("model.py", "documents attend to those before them",
               "        if documents is None:\n            q_BHTK", "        if True:\n            q_BHTK",
               layout("document mask"))),
    PublicBug(
        "pytorch/torchtitan", 1593, "merged",
        "Activation checkpointing counted the tokens of each expert twice.",
        known_mutant("a forward that is repeated counts tokens again", f"{MOE}::test_a_backward_counts_tokens_once")),
    PublicBug(
        "pytorch/torchtitan", 3686, "merged",
        "A layer without balanced experts ended the update of the biases that balance those of the others.",
        Mutant("techniques/moe/balance.py", "the experts of the first layer only are balanced",
               "for index, router in self.routers.items():\n            load_E",
               "for index, router in [*self.routers.items()][:1]:\n            load_E",
               f"{MOE}::test_an_update_adjusts_the_biases_by_the_sign_of_the_load")),
    PublicBug(
        "NVIDIA-NeMo/Automodel", 3359, "merged",
        "Auxiliary losses were not divided by the number of accumulation steps.",
        known_mutant("the auxiliary loss is that of each rank's tokens", AUXILIARY)),
    PublicBug(
        "NVIDIA-NeMo/Automodel", 1412, "merged",
        "What attaches the auxiliary loss to the scores was computed and dropped: it had no gradient.",
        Mutant("techniques/moe/router.py", "auxiliary losses have no gradient",
               "return _Balance.apply(scores_NE, loss / self.tokens_per_step, record, self)",
               "_Balance.apply(scores_NE, loss / self.tokens_per_step, record, self)\n        return scores_NE",
               AUXILIARY)),
    PublicBug(
        "NVIDIA/Megatron-LM", 7227, "open",
        "With tied embeddings, the norm counted the weight of both ends of a pipeline.",
        Mutant("config/rules_parallelism.py", "tied embeddings are accepted on two stages of a pipeline",
               "    if config.model.tie_embeddings:\n", "    if False:\n",
               "tests/config/test_config_rules.py::test_rejected[tie_embeddings=True, pipeline_parallel_degree=2]")),
]  # fmt: skip

VALIDATION = [
    PublicBug(
        "pytorch/torchtitan", 4167, "merged",
        "The validation loss was the mean of the batches' means.",
        Mutant("train_step.py", "the validation loss is the mean of the batches' means",
               "            totals[0] += self.runner.forward(batch.to(self.device))\n"
               "            totals[1] += count_valid([batch.targets], self.device)\n",
               "            totals[0] += self.runner.forward(batch.to(self.device)) / "
               "count_valid([batch.targets], self.device).clamp(min=1)\n            totals[1] += 1\n",
               TWO_RANKS)),
    PublicBug(
        "pytorch/torchtitan", 2366, "merged",
        "The validation loss was divided by the ranks once more.",
        Mutant("train_step.py", "the validation loss is divided by the ranks",
               "return (totals[0] / totals[1]).item()", "return (totals[0] / totals[1]).item() / dist.get_world_size()",
               TWO_RANKS)),
    PublicBug(
        "pytorch/torchtitan", 3257, "merged",
        "With context parallelism, a validation counted the tokens of a rank's shard of the sequence only.",
        Mutant("train_step.py", "a validation counts the tokens of this rank only",
               "torch.zeros_like(totals)\n        dist.all_reduce(totals)",
               "torch.zeros_like(totals)\n        dist.all_reduce(totals[:1])", TWO_RANKS)),
    PublicBug(
        "allenai/OLMo-core", 652, "merged",
        "A validation began where the one before had stopped, with other data.",
        Mutant("data/loader.py", "a validation begins after the batches of the one before",
               "    for batch in range(n_validation_batches(sequences, training, validation, share)):\n",
               "    begin = validation_batches.__dict__.setdefault('begin', 0)\n"
               "    n_batches = n_validation_batches(sequences, training, validation, share)\n"
               "    validation_batches.begin += n_batches\n"
               "    for batch in range(begin, begin + n_batches):\n",
               f"{LOADER}::test_validation_takes_every_target_once[2-17]")),
    PublicBug(
        "pytorch/torchtitan", 3280, "closed",
        "With tensor and context parallelism, the loss that was shown was not summed over context-parallel ranks.",
        known_mutant("the loss of the step is not summed over ranks", TWO_RANKS)),
    PublicBug(
        "pytorch/torchtitan", 3111, "open",
        "With context parallelism, the largest loss of the ranks was divided by the tokens of more than one rank.",
        Mutant("train_step.py", "the largest loss is divided by the tokens of all ranks",
               "own = loss_sum / count_valid([batch.targets for batch in batches], loss_sum.device)",
               "own = loss_sum / count_valid([batch.targets for batch in batches], loss_sum.device) "
               "/ dist.get_world_size()", f"{TRAIN}::test_global_max_loss_is_the_worst_ranks")),
]  # fmt: skip

DATA = [
    PublicBug(
        "pytorch/torchtitan", 2755, "merged",
        "In chats, the first token of an answer was no target.",
        Mutant("techniques/data/best_fit.py", "the first token of an answer is no target",
               "np.where(stored & not_trained, IGNORED, tokens)[1:]",
               "np.where(stored[:-1] & not_trained, IGNORED, tokens[1:])",
               "tests/techniques/data/test_fine_tuning.py::test_only_what_the_assistant_says_is_a_target"
               "[prefixes-.jsonl]")),
    PublicBug(
        "pytorch/torchtitan", 2556, "merged",
        "A dataset had the same order in every epoch.",
        known_mutant("all epochs have the same order", f"{LOADER}::test_an_epochs_order_is_a_permutation")),
    PublicBug(
        "KempnerInstitute/KempnerForge", 51, "closed",
        "The position in the data was not saved: each resume began with the first epoch again.",
        Mutant("checkpoint/run.py", "the position in the data is not saved",
               '"data": self.loader.state(), ', '"data": {"next_sequence": 0}, ',
               f"{RESTORED}::test_the_state_of_a_run_has_that_of_each_part")),
    PublicBug(
        "EleutherAI/gpt-neox", 308, "merged",
        "A resumed run read data again, as accumulation steps were left out of its position.",
        Mutant("data/loader.py", "the position of a run counts one accumulation step of each",
               "item\n        self.position += self.training.global_batch_size",
               "item\n        self.position += self.training.local_batch_size * self.data_parallel_degree",
               f"{LOADER}::test_resume_on_other_ranks_keeps_the_order[ranks_and_batches4]")),
    PublicBug(
        "pytorch/torchtitan", 816, "merged",
        "A run that resumed on fewer data-parallel ranks lost the position of the others, without an error.",
        Mutant("data/loader.py", "the position of a run is that of one rank",
               '"next_sequence": self.position, ', '"next_sequence": self.position // self.data_parallel_degree, ',
               ORDER_AFTER_RESUME)),
    PublicBug(
        "allenai/OLMo", 650, "closed",
        "After a resume, later epochs did not begin at their first sequence, but where the run had resumed.",
        Mutant("data/packing.py", "later epochs begin where the run has resumed",
               "        while True:\n            yield self[first], None\n            first += stride\n",
               "        start = first // stride * stride % self.n_sequences\n        while True:\n"
               "            yield self[first], None\n            epoch = first // self.n_sequences\n"
               "            first += stride\n"
               "            first += start if first // self.n_sequences > epoch else 0\n",
               ORDER_AFTER_RESUME)),
    PublicBug(
        "huggingface/accelerate", 4071, "merged",
        "A run that resumed within a later epoch read it in the order of the first one.",
        Mutant("data/packing.py", "a resumed run takes its epoch for the first one",
               "        while True:\n            yield self[first], None\n",
               "        first %= self.n_sequences\n        while True:\n            yield self[first], None\n",
               ORDER_AFTER_RESUME)),
]  # fmt: skip

STATE = [
    PublicBug(
        "pytorch/torchtitan", 3106, "open",
        "With CPU offload, weights of the same shape began with the same numbers, on all ranks.",
        known_mutant("all parameters of a shape begin with the same numbers",
                     "tests/test_model.py::test_another_seed_or_name_gives_other_weights")),
    PublicBug(
        "pytorch/pytorch", 168058, "open",
        "DTensor's random numbers, and so initial weights, depended on the number of ranks.",
        Mutant("init.py", "initial weights are others if they are sharded",
               "full.normal_(0.0, std, generator=_generator(seed, name, device))",
               "full.normal_(0.0, std, generator=_generator(seed + isinstance(parameter, DTensor), name, device))",
               TWO_RANKS)),
    PublicBug(
        "pytorch/torchtitan", 335, "closed",
        "Rotary embeddings pair channels in another way than the weights of Hugging Face, which gave wrong results.",
        known_mutant("an export has the rows of rotated heads in the order of a checkpoint",
                     "tests/hf/test_hf_export.py::test_transformers_loads_the_same_model[llama-several files]")),
    PublicBug(
        "pytorch/torchtitan", 1261, "closed",
        "The learning-rate schedule was one step off.",
        known_mutant("the warm-up is one step behind",
                     "tests/tools/test_from_torchtitan.py::test_every_step_has_torchtitans_learning_rate"
                     "[10-None-2-0.8-0.0-linear]")),
    PublicBug(
        "pytorch/torchtitan", 275, "merged",
        "The learning-rate schedule was not saved: it began again at each resume.",
        Mutant("train.py", "the learning-rate schedule begins again at a resume",
               "set_lr(optimizer, step, ", "set_lr(optimizer, step - last_step, ", RESUMED)),
    PublicBug(
        "pytorch/pytorch", 144657, "closed",
        "An asynchronous checkpoint of weights in host memory had those of a later step.",
        known_mutant("an asynchronous save writes weights that the training changes",
                     f"{RESTORED}::test_an_asynchronous_save_has_the_weights_of_its_step")),
    PublicBug(
        "NVIDIA-NeMo/RL", 3312, "open",
        "Asynchronous checkpoints after the first one had the weights and states of the first one.",
        Mutant("checkpoint/checkpointer.py", "asynchronous saves write what the first one has copied",
               "self._host_copies[name] = copy\n            copies[name] = copy.copy_(tensor, non_blocking=True), ",
               "self._host_copies[name] = copy.copy_(tensor)\n            copies[name] = copy, ",
               f"{RESTORED}::test_an_asynchronous_save_has_the_weights_of_its_step")),
    PublicBug(
        "KempnerInstitute/KempnerForge", 102, "closed",
        "`latest` named an asynchronous checkpoint before its files were written, and a resume took it.",
        known_mutant("what a killed run has not finished is taken for a checkpoint",
                     f"{RESTORED}::test_what_a_killed_run_has_not_finished_is_no_checkpoint")),
    PublicBug(
        "NVIDIA-NeMo/Megatron-Bridge", 4678, "merged",
        "The only complete checkpoint was deleted before the next one was written.",
        Mutant("checkpoint/folder.py", "older checkpoints are deleted before the next one is written",
               "        self.remove_unfinished(step)\n        path.mkdir(parents=True)",
               "        self.remove_unfinished(step)\n        good = checkpoints(self.path, \"\")\n"
               "        for old in good[: max(len(good) + 1 - self.keep_latest_k, 0)] if self.keep_latest_k else []:\n"
               "            self._delete(old)\n        path.mkdir(parents=True)",
               f"{RESTORED}::test_the_only_checkpoint_stays_until_the_next_one_is_complete")),
    PublicBug(
        "KempnerInstitute/KempnerForge", 202, "open",
        "With expert parallelism, a checkpoint had the experts of one rank only, under the names of all.",
        Mutant("checkpoint/tensors.py", "the experts of all ranks are saved as the first ones",
               "plain_shard(tensor), offset, ", "plain_shard(tensor), offset if len(offset) < 3 else (0, 0, 0), ",
               "tests/hf/test_hf_export.py::test_a_checkpoint_of_a_sharded_run_is_exported[olmoe, ep]")),
]  # fmt: skip

MERGED = "tests/techniques/test_lora_folders.py::test_adapters_are_merged_into_shards"
ADAPTERS = [
    PublicBug(
        "NVIDIA-NeMo/Megatron-Bridge", 2193, "open",
        "LoRA was not merged with tensor parallel above 1: adapters had another shape than the sharded weights.",
        Mutant("checkpoint/adapters.py", "each tensor-parallel rank merges the first rows of B",
               "b_OR[..., rows, :]", "b_OR[..., : len(rows), :]", MERGED)),
    PublicBug(
        "axolotl-ai-cloud/axolotl", 3294, "open",
        "LoRA was not merged into the weights of a run with FSDP2.",
        Mutant("checkpoint/adapters.py", "each rank merges the first columns of A",
               "a_IR[..., columns, :]", "a_IR[..., : len(columns), :]", MERGED)),
    PublicBug(
        "modelscope/ms-swift", 7786, "closed",
        "With LoRA and tensor parallel, the norm over all heads had the width of all heads, and its input of some.",
        Mutant("techniques/norm_over_heads.py", "the norm over all heads is over those of a rank",
               "mean = wide.square().sum(-1, keepdim=True).redistribute(placements=[Replicate()]) / wide.shape[-1]",
               "mean = DTensor.from_local(wide.to_local().square().mean(-1, keepdim=True), mesh, [Replicate()])",
               "tests/techniques/test_lora.py::test_layout_matches_reference[tp 2, norm over all heads]")),
]  # fmt: skip

PUBLIC_BUGS = [*LOSSES, *NORMS, *PARALLEL, *VALIDATION, *DATA, *STATE, *ADAPTERS]


def table() -> str:
    """Return the bugs as a table of markdown."""
    head = "| trainer and issue | what was wrong | the same mistake here | test that fails |"
    rows = [
        f"| [{bug.repository.partition('/')[2]} {bug.number}]({bug.url}), {bug.state} | {bug.what} | "
        f"{bug.mutant.what} | `{bug.test.removeprefix('tests/')}` |"
        for bug in PUBLIC_BUGS
    ]
    return "\n".join([head, "| --- | --- | --- | --- |", *rows]) + "\n"


def arguments_of(*tests: str) -> list[str]:
    """Return arguments of pytest for tests, also nightly ones, on a busy machine."""
    return [*tests, "-m", "nightly or not nightly", "--timeout=600"]


def error_without(bugs: Iterable[PublicBug]) -> str:
    """Run the tests of bugs without their mutants. Return the first one that fails, and its error; "" if all pass."""
    return ": ".join(first_failure(ROOT, arguments_of(*dict.fromkeys(bug.test for bug in bugs)))).removesuffix(": ")


@functools.cache
def error_with(mutant: Mutant) -> str:
    """Return the error of a mutant's test; "" if it passes."""
    with mutated_copy(mutant) as folder:
        failed, error = first_failure(folder, arguments_of(mutant.tests))
    return error if failed == mutant.tests and not error.startswith(CRASHES) else ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="bugs whose link, description or test has this text")
    arguments = parser.parse_args(argv)
    bugs = [bug for bug in PUBLIC_BUGS if arguments.only in f"{bug.url} {bug.mutant.what} {bug.test}"]
    error = error_without(bugs)
    print(f"without the mistakes: {error or 'all of these tests pass'}", flush=True)
    n_caught = 0
    for bug in bugs if not error else []:
        begin, error = time.monotonic(), error_with(bug.mutant)
        seconds, verdict = round(time.monotonic() - begin), f"failed as it must: {error}" if error else "DID NOT FAIL"
        n_caught += bool(error)
        told = bug.repository, str(bug.number), bug.mutant.what, bug.test, verdict[:200], f"{seconds} s"
        print(" | ".join(told), flush=True)
    print(f"{n_caught} of {len(bugs)} bugs are caught")
    return int(n_caught < len(bugs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
