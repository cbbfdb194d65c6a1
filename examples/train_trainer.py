"""Hugging Face Trainer: torchrun --nproc-per-node 2 examples/train_trainer.py."""

from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from laconic.integrations.transformers import CompressCallback

digits: Any = load_digits()  # 1797 digits of 8 x 8 pixels
images = torch.tensor(digits.images / 8 - 1, dtype=torch.float32).unsqueeze(1)
rows: Any = [
    {"pixel_values": image, "labels": label}
    for image, label in zip(images, digits.target, strict=True)
]
shape: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 10}
config = ViTConfig(
    image_size=8,
    patch_size=2,
    num_channels=1,
    hidden_size=128,
    intermediate_size=256,
    **shape,
)
args = TrainingArguments(
    "trainer_output",
    use_cpu=not torch.cuda.is_available(),  # or the Trainer leaves CPU ranks alone
    num_train_epochs=6,
    per_device_train_batch_size=32,
    learning_rate=2e-3,
    logging_steps=20,
    save_steps=50,
    report_to="none",
)
model = ViTForImageClassification(config)
compress = CompressCallback("ecdq:error=0.08")
trainer = Trainer(model, args, train_dataset=rows[360:], callbacks=[compress])
trainer.train()

guess: Any = trainer.predict(rows[:360])
accuracy = float((guess.predictions.argmax(-1) == guess.label_ids).mean())
if trainer.is_world_process_zero() and compress.handle is not None:
    print(f"{accuracy:.1%} right, {compress.handle.stats().ratio:.1f} times fewer bytes")
if dist.is_initialized():
    dist.destroy_process_group()
