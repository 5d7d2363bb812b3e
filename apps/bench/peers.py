"""Times PyTorch and PEFT on the shapes of rowan-bench: peers.py REQUEST.json ANSWER.json."""
import json
import statistics
import sys

import torch

torch.manual_seed(0)
DEVICE = "cuda"


def percentiles(samples):
    samples = sorted(samples)
    at = lambda share: samples[int(share * (len(samples) - 1) + 0.5)]
    return {"median": statistics.median(samples), "low": at(0.1), "high": at(0.9)}


def time_interleaved(runs, repeats, calls=20):
    """Microseconds a call of each function of a rotation index: `calls` calls between two events, in turns."""
    for run in runs:
        for i in range(3):
            run(i)
    torch.cuda.synchronize()
    samples = [[] for _ in runs]
    for _ in range(repeats):
        events = []
        for run in runs:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for i in range(calls):
                run(i)
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        for sample, (begin, end) in zip(samples, events):
            sample.append(begin.elapsed_time(end) * 1000 / calls)
    return [percentiles(sample) for sample in samples]


def lora(request):
    m, k, n, rank, repeats = (request[key] for key in ("m", "k", "n", "rank", "repeats"))
    sets = 3
    bf16 = dict(device=DEVICE, dtype=torch.bfloat16)
    xs = [torch.randn(m, k, requires_grad=True, **bf16) for _ in range(sets)]
    dys = [torch.randn(m, n, **bf16) for _ in range(sets)]
    rows = []

    def measure(name, layer, parameters):
        frozen = torch.nn.Linear(k, n, bias=False, **bf16).requires_grad_(False)
        ys = [layer(x) for x in xs]
        frozen_ys = [frozen(x) for x in xs]

        def forward(module):
            def run(i):
                with torch.no_grad():
                    module(xs[i % sets])
            return run

        def backward(outputs, wanted):
            return lambda i: torch.autograd.grad(outputs[i % sets], [xs[i % sets]] + wanted, dys[i % sets], retain_graph=True)

        t = time_interleaved([forward(frozen), forward(layer), backward(frozen_ys, []), backward(ys, parameters)], repeats, 10)
        frozen_forward, forward_, frozen_backward, backward_ = (sample["median"] for sample in t)
        rows.append({"peer": name, "frozen us": frozen_forward, "forward us": forward_, "ratio": forward_ / frozen_forward,
                     "frozen dx us": frozen_backward, "backward us": backward_, "dx ratio": backward_ / frozen_backward})

    class Eager(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base = torch.nn.Linear(k, n, bias=False, **bf16).requires_grad_(False)
            self.a = torch.nn.Parameter(torch.randn(rank, k, **bf16) * 0.02)
            self.b = torch.nn.Parameter(torch.randn(n, rank, **bf16) * 0.02)

        def forward(self, x):
            return self.base(x) + 2 * ((x @ self.a.T) @ self.b.T)

    eager = Eager()
    measure("PyTorch eager", eager, [eager.a, eager.b])
    compiled = torch.compile(Eager(), dynamic=False)
    measure("torch.compile", compiled, [compiled.a, compiled.b])
    try:
        import peft
    except ImportError:
        return {"rows": rows}

    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(k, n, bias=False, **bf16)

        def forward(self, x):
            return self.linear(x)

    model = peft.get_peft_model(Holder(), peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["linear"]))
    model = model.to(torch.bfloat16)
    measure("PEFT eager", model, [p for p in model.parameters() if p.requires_grad])
    return {"rows": rows}


def newton_schulz(request):
    from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, _zeropower_via_newtonschulz
    rows = {}
    for height, width in request["sizes"]:
        xs = [torch.randn(height, width, device=DEVICE) for _ in range(max(1, min(8, (400 << 20) // (4 * height * width))))]
        run = lambda i: _zeropower_via_newtonschulz(xs[i % len(xs)], (DEFAULT_A, DEFAULT_B, DEFAULT_C), 5, 1e-7)
        calls = 3 if height * width > 1 << 22 else 20
        rows[f"{height}x{width}"] = time_interleaved([run], request["repeats"], calls)[0]
    return {"rows": rows}


def optimizers(request):
    rows = []

    def measure(name, what, shapes, make):
        parameters = [torch.nn.Parameter(torch.randn(*shape, device=DEVICE) * 0.02) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter) * 0.01
        optimizer = make(parameters)
        sample = time_interleaved([lambda i: optimizer.step()], min(request["repeats"], 10), 2)[0]
        rows.append({"optimizer": name, "parameters": what, "tensors": len(shapes), "ms": sample["median"] / 1000})
        del optimizer, parameters
        torch.cuda.empty_cache()

    linears = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    factors = [shape for _ in range(32) for out, in_ in linears for shape in ((16, in_), (out, 16))]
    small = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)]
    dense = [shape for _ in range(16) for shape in small]
    for what, shapes in (("LoRA factors, 8B, r 16", factors), ("matrices of a 1B Llama", dense)):
        measure("AdamW fused", what, shapes, lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True))
        measure("Muon", what, shapes, lambda p: torch.optim.Muon(p, lr=1e-4))
    return {"rows": rows}


def main():
    request = json.load(open(sys.argv[1]))
    answer = {"lora": lora, "newton_schulz": newton_schulz, "optimizers": optimizers}[request["bench"]](request)
    answer["torch"] = torch.__version__
    json.dump(answer, open(sys.argv[2], "w"))


main()
