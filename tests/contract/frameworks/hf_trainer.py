"""Trains a small Llama with Hugging Face's Trainer, and evaluates it."""

import argparse
import tempfile

import torch
from telling import tell
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--optim", default="adamw_torch")
parser.add_argument("--torch-compile-backend")
args = parser.parse_args()

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=16,
    attn_implementation="eager",  # in low precision as it stands; the other is fp32 if it is short
)
model = LlamaForCausalLM(config)
tokens = torch.randint(0, 64, (48, 8))
dataset = [{"input_ids": row, "labels": row} for row in tokens]

with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        max_steps=6,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        bf16=args.bf16,
        optim=args.optim,
        torch_compile_backend=args.torch_compile_backend,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=dataset, eval_dataset=dataset[:8])
    trainer.remove_callback(PrinterCallback)  # it prints how long the training took
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
tell([*losses, evaluated], model)
