"""What is known beforehand of each script in ``tests/scripts``, counted by hand from its loops."""

from __future__ import annotations

from dataclasses import dataclass

from fasttrain.model.outcome import State

APPLIED, CEDED, SKIPPED, FAILED = State.APPLIED, State.CEDED, State.SKIPPED, State.FAILED
NO_KERNEL = "fused kernel"
SECOND = "(create_graph=True at"


@dataclass(frozen=True)
class Script:
    """One script.

    Attributes:
        name: Its file, without the suffix.
        forwards: Calls of outermost modules, validation, teachers and averages included.
        steps: Steps of all optimizers together; 0 where the script makes or skips them by itself.
        targets: Modules that are compiled: the outermost ones with something to train.
        graphs: One for each mode that a target is called in (training, no_grad, another shape).
        bf16, fp16, compiled, fused: How the levers end.
        no_fp16: Why there is no run in fp16: refused by fasttrain, or unsupported by torch.
        reason: What the receipt says at least where a lever isn't applied, by option.
    """

    name: str
    forwards: int
    steps: int
    targets: int = 1
    graphs: int = 1
    bf16: State = APPLIED
    fp16: State = APPLIED
    compiled: State = APPLIED
    fused: State = APPLIED
    no_fp16: str = ""
    reason: str = ""


SCRIPTS = [
    Script("mlp_steplr", 3 * 10, 3 * 10),
    Script("convnet_batchnorm", 3 * (10 + 1), 3 * 10, graphs=2),  # training, validation
    Script("gpt_cosine", 24, 24),
    Script("accumulate_odd", 4 * 22, 4 * 6),
    # the discriminator behind the generator gets an input that wants a gradient
    Script("gan_bce", 24 * 4, 24 * 2, targets=2, graphs=1 + 2),
    Script("wgan_gp", 8 * (3 * (1 + 3) + 2), 8 * (3 + 1), 0, 0, compiled=SKIPPED, reason=SECOND),
    Script("vae_sum", 3 * (10 + 1), 3 * 10, graphs=2),
    Script("siamese_bce", 30, 30, fused=SKIPPED, reason=NO_KERNEL),
    Script("char_lstm", 20, 20, graphs=0, no_fp16="unsupported", compiled=FAILED, reason="LSTM"),
    Script("seq2seq_parts", 25 * 2 + 2, 25, 2, 2 * 2, fused=SKIPPED, reason=NO_KERNEL),
    # its method calls three parts, each of them an outermost module
    Script("loss_method", 3 * (28 + 1), 28, targets=3, graphs=3 * 2),
    Script("training_step", 3 * (10 + 2), 3 * 10, graphs=2),
    Script("loss_parameters", 26 * 3, 26, targets=3, graphs=3),
    Script("distillation_ema", 24 * 2 + 3 * 2, 24),
    # the average: only evaluation, as batch norm reads a counter's value during update_bn
    Script("swa_update_bn", 4 * 8 + 8 + 1, 4 * 8, targets=2, graphs=1 + 1),
    Script("sparse_embeddings", 25, 25 * 2),
    Script("lbfgs_closure", 8 * 4, 8, no_fp16="refused", fused=SKIPPED, reason=NO_KERNEL),
    # the first hidden state wants no gradient; the others do
    Script("manual_sgd", 30 * 4, 0, graphs=2, fused=State.ARMED, reason="optimizer"),
    Script("retain_graph", 30, 30),
    Script("multitask_dataclass", 24, 24),
    Script("reinforce", 25 * 8, 25),
    # the policy: one state without gradients, then a batch; the target network: a batch
    Script("dqn_target", 45 + 30 * 2, 30, targets=2, graphs=2 + 1),
    Script("maml_functional", 22 * 3 * 2, 22, 0, 0, compiled=SKIPPED, reason=SECOND),
    Script("contrastive_infonce", 24, 24),
    # what comes before the GRU, which dynamo leaves alone: the first length, then any
    Script("packed_lengths", 25, 25, graphs=2),
    Script("masked_transformer", 24, 24, graphs=2),  # the first length, then any
    # 16 a batch, then any number, then without gradients
    Script("loader_workers", 3 * (10 + 2), 3 * 10, graphs=3, fused=SKIPPED, reason=NO_KERNEL),
    Script("unfreeze_later", 30, 30, graphs=2),
    Script("progressive_growing", 3 * 10, 3 * 10, targets=3, graphs=3),
    Script("own_amp", 0, 24, bf16=CEDED, fp16=CEDED, reason="precision"),
    Script("own_compile", 25, 25, 0, 0, compiled=CEDED, reason="Sequential"),
    Script("finite_guard", 28, 0),
    Script("unet_dice", 22, 22),
    Script("resume_midway", 30, 30, targets=2, graphs=2),
    Script("activation_checkpoint", 24 + 4, 24, graphs=2),
    Script("scripted_part", 24, 24, graphs=0, compiled=FAILED, reason="torch.jit.script"),
]
