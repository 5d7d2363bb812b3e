#!/usr/bin/env python3
"""Holds rowan against Transformers and PEFT, in float32, on one tiny model a family.

run.py --rowan PROGRAM [--device cpu|cuda] [--models DIR] [--summary FILE.json]

For each family of tests/data/models (or DIR):
  steps      ten steps of AdamW from one initial adapter on the same rows: the losses of rowan and of PEFT, step by step
  factors    the adapters after them, the largest difference relative to the largest entry
  adapter    PeftModel.from_pretrained loads rowan's adapter without a word about keys; log-probabilities agree with rowan eval
  checkpoint the same for a checkpoint's directory
  merged     AutoModelForCausalLM.from_pretrained loads what rowan merge wrote; log-probabilities agree with rowan eval on it
  full       the same for a model all of whose weights rowan trained
  events     TensorBoard's own reader gives the numbers of metrics.jsonl (where the package tensorboard is installed)
  gguf       rowan export --gguf, read back (gguf_check.py)
PEFT runs on the CPU. Prints a table; with --summary sets the key peft_interop_passed of that file. Status 0 when everything agrees.
Needs torch, transformers, peft.
"""
import argparse
import contextlib
import io
import json
import logging
import pathlib
import shutil
import subprocess
import sys
import tempfile
import warnings

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import gguf_check

HERE = pathlib.Path(__file__).resolve().parent
LEARNING_RATE = 2e-3
STEPS = 10
PROBES = 6  # log-probabilities that are compared


def make_rows(vocabulary, count=8):
    """Rows of several lengths with labels that do not count."""
    generator = torch.Generator().manual_seed(11)
    rows = []
    for r in range(count):
        ids = torch.randint(0, vocabulary, (12 + 5 * r,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * (r % 4) + ids[r % 4:]})
    return rows


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def padded(rows):
    length = max(len(row["input_ids"]) for row in rows)
    fill = lambda row, key, value: row[key] + [value] * (length - len(row[key]))
    return {"input_ids": torch.tensor([fill(row, "input_ids", 0) for row in rows]),
            "labels": torch.tensor([fill(row, "labels", -100) for row in rows]),
            "attention_mask": torch.tensor([[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows])}


class Messages(logging.Handler):
    """What libraries warn of while it is open, by any way."""

    def __enter__(self):
        self.texts = []
        self.output = io.StringIO()
        self.stack = contextlib.ExitStack()
        self.caught = self.stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        self.stack.enter_context(contextlib.redirect_stderr(self.output))
        self.stack.enter_context(contextlib.redirect_stdout(self.output))
        for name in ("", "transformers", "peft"):
            logging.getLogger(name).addHandler(self)
        return self

    def emit(self, record):
        self.texts.append(record.getMessage())

    def __exit__(self, *error):
        for name in ("", "transformers", "peft"):
            logging.getLogger(name).removeHandler(self)
        self.stack.close()

    def about_keys(self):
        texts = self.texts + [str(warning.message) for warning in self.caught] + self.output.getvalue().splitlines()
        return [text for text in texts if any(word in text.lower() for word in ("key", "missing", "unexpected", "not initialized", "newly"))]


def load_model(directory):
    return AutoModelForCausalLM.from_pretrained(directory, torch_dtype=torch.float32, attn_implementation="eager")


class Family:
    def __init__(self, rowan, device, source, scratch):
        self.rowan, self.device, self.source, self.scratch = rowan, device, source, scratch
        self.vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
        self.rows = make_rows(self.vocabulary)
        self.data = scratch / "rows.jsonl"
        write_rows(self.data, self.rows)
        self.start = scratch / "start"
        shutil.copytree(source / "adapter", self.start)

    def run(self, *arguments, where=True):
        command = [str(self.rowan), *map(str, arguments)] + (["--device", self.device] if where else [])
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}: status {done.returncode}: {done.stderr}"
        return done.stdout

    def finetune(self, out, *options):
        self.run("finetune", "--json", "--model", self.source, "--data", self.data, "--out", out, "--dtype", "float32",
                 "--optimizer", "adamw", "--learning-rate", LEARNING_RATE, "--lr-scheduler", "constant", "--max-grad-norm", 0,
                 "--batch-size", len(self.rows), "--max-steps", STEPS, *options)
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return [record["loss"] for record in records if "loss" in record]

    def peft_steps(self):
        """The same steps with PEFT: losses, and the adapter's tensors by their names in its file."""
        model = PeftModel.from_pretrained(load_model(self.source), self.start, is_trainable=True)
        model.train()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
        batch, losses = padded(self.rows), []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        tensors = {name.replace(".default", ""): p.detach() for name, p in model.named_parameters() if "lora_" in name}
        return losses, tensors

    def worst_log_probability(self, model, *options):
        """rowan eval of rows in which one token counts, against log-softmax of the model's logits there."""
        worst = 0.0
        model.eval()
        for probe in range(PROBES):
            ids = self.rows[probe % len(self.rows)]["input_ids"]
            position, token = 1 + 7 * probe % (len(ids) - 1), (37 * probe + 5) % self.vocabulary
            row = {"input_ids": ids, "labels": [token if i == position else -100 for i in range(len(ids))]}
            path = self.scratch / "probe.jsonl"
            write_rows(path, [row])
            ours = json.loads(self.run("eval", "--json", "--dtype", "float32", "--data", path, *options))["loss"]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0, position - 1].double()
            worst = max(worst, abs(ours + torch.log_softmax(logits, -1)[token].item()))
        return worst

    def worst_of_adapter(self, directory):
        base = load_model(self.source)
        with Messages() as messages:
            model = PeftModel.from_pretrained(base, directory)
        assert not messages.about_keys(), messages.about_keys()
        return self.worst_log_probability(model, "--model", self.source, "--adapter", directory)

    def worst_of_model(self, directory):
        with Messages() as messages:
            model = load_model(directory)
        assert not messages.about_keys(), messages.about_keys()
        return self.worst_log_probability(model, "--model", directory)

    # Each check gives a figure and the bound that it must keep; None: not to be had here.

    def check_steps(self):
        ours = self.finetune(self.scratch / "run", "--adapter", self.start, "--save-steps", 5)
        theirs, self.peft_tensors = self.peft_steps()
        assert len(ours) == len(theirs) == STEPS, (len(ours), len(theirs))
        assert theirs[-1] < theirs[0], theirs
        return max(abs(a - b) for a, b in zip(ours, theirs)), 1e-4

    def check_factors(self):
        ours = load_file(self.scratch / "run" / "adapter" / "adapter_model.safetensors")
        assert ours.keys() == self.peft_tensors.keys(), sorted(ours.keys() ^ self.peft_tensors.keys())[:4]
        largest = max(tensor.abs().max().item() for tensor in ours.values())
        # A gradient entry near zero may differ in sign, and AdamW's first steps have the same size whatever the gradient.
        return max((ours[name] - tensor).abs().max().item() for name, tensor in self.peft_tensors.items()) / largest, 1e-1

    def check_adapter(self):
        return self.worst_of_adapter(self.scratch / "run" / "adapter"), 1e-4

    def check_checkpoint(self):
        return self.worst_of_adapter(self.scratch / "run" / "checkpoints" / "checkpoint-5"), 1e-4

    def check_merged(self):
        out = self.scratch / "merged"
        self.run("merge", "--model", self.source, "--adapter", self.scratch / "run" / "adapter", "--out", out, where=False)
        return self.worst_of_model(out), 1e-4

    def check_full(self):
        self.finetune(self.scratch / "full", "--method", "full")
        return self.worst_of_model(self.scratch / "full" / "model"), 1e-4

    def check_events(self):
        try:
            import tensorboard  # noqa: F401
        except ImportError:
            return None, None
        import tensorboard_check
        run = self.scratch / "run"
        tensorboard_check.check(str(run), str(run / "tensorboard"))
        return 0.0, 0.0

    def check_gguf(self):
        out = self.scratch / "adapter.gguf"
        adapter = self.scratch / "run" / "adapter"
        self.run("export", "--gguf", "--model", self.source, "--adapter", adapter, "--out", out, "--dtype", "float32", where=False)
        return max(gguf_check.check(str(self.source), str(adapter), str(out)).values()), 1e-6


def check_family(family):
    """Rows of the table: check, figure, bound, verdict."""
    for name in ("steps", "factors", "adapter", "checkpoint", "merged", "full", "events", "gguf"):
        try:
            figure, bound = getattr(family, "check_" + name)()
            verdict = "not installed" if figure is None else "ok" if figure <= bound else "FAILED"
            yield name, figure, bound, verdict
        except Exception as error:  # the table goes on: one failure must not hide the others
            yield name, None, None, f"FAILED: {type(error).__name__}: {error}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rowan", required=True, type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", type=pathlib.Path, default=HERE.parent / "data" / "models")
    parser.add_argument("--summary", type=pathlib.Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    passed = True
    print(f"{'family':10}{'check':12}{'worst':>12}{'bound':>10}  verdict")
    families = sorted(path for path in options.models.iterdir() if (path / "adapter").is_dir())
    for source in families:
        with tempfile.TemporaryDirectory() as scratch:
            family = Family(options.rowan, options.device, source.resolve(), pathlib.Path(scratch))
            for name, figure, bound, verdict in check_family(family):
                passed = passed and not verdict.startswith("FAILED")
                numbers = f"{'':>12}{'':>10}" if figure is None else f"{figure:12.2e}{bound:10.0e}"
                print(f"{source.name:10}{name:12}{numbers}  {verdict}", flush=True)
    passed = passed and bool(families)
    if options.summary:
        summary = json.loads(options.summary.read_text()) if options.summary.exists() else {}
        summary["peft_interop_passed"] = passed
        options.summary.parent.mkdir(parents=True, exist_ok=True)
        options.summary.write_text(json.dumps(summary, indent=2) + "\n")
    print("all agree" if passed else "something does not agree")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
