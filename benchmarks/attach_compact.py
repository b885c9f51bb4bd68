"""What `attach` and `compact` cost: seconds, forwards and memory, for six networks in float32, two examples each.

python benchmarks/attach_compact.py [--only wrn vit] [--json FILE]

Each network gets a process of its own with one thread, and the seconds are those of its processor: on a machine with
other work they are what a quiet one would show, or a little more. A forward is one of the network on its example, in
evaluation and without gradients. Memory is by how much the process grew at most, over what the network takes; torch's
own compiler, which `torch.export` imports, is imported before. The goals: `attach` in 8 forwards and 5 s, `compact` in
4 forwards and 2 s, either in 3 times the network's memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provenance import write
from torch import Tensor, nn

import ellzero as l0
from ellzero.experiments.networks import LeNet5, WideResNet


class Bottleneck(nn.Module):
    """The block of a ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        self.convs = nn.ModuleList(nn.Conv2d(i, o, k, s, k // 2, bias=False) for i, o, k, s in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _, _ in sizes)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for k, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            y = y.relu() if k < 2 else y
        return (y + self.shortcut(x)).relu()


def resnet50() -> tuple[nn.Module, Any]:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        for k in range(count):
            layers.append(Bottleneck(inputs, 64 << stage, 2 if stage and not k else 1))
            inputs = 256 << stage
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    return nn.Sequential(*layers), (torch.randn(2, 3, 224, 224),)


def mlp() -> tuple[nn.Module, Any]:
    layers = [nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)]
    return nn.Sequential(*layers), (torch.randn(2, 784),)


def vit() -> tuple[nn.Module, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_labels=1000)), {"pixel_values": torch.randn(2, 3, 224, 224)}


def llama() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 12, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 10, "num_key_value_heads": 5}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **sizes, **heads))
    return model, {"input_ids": torch.randint(0, 32000, (2, 128)), "use_cache": False}


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "mlp": mlp,
    "lenet": lambda: (LeNet5(), (torch.randn(2, 1, 28, 28),)),
    "resnet50": resnet50,
    "wrn": lambda: (WideResNet(28, 10), (torch.randn(2, 3, 32, 32),)),
    "vit": vit,
    "llama": llama,
}


def measured(name: str) -> dict[str, float]:
    """The numbers of one network, in this process."""
    import torch._dynamo  # what `torch.export` imports

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, example = NETWORKS[name]()
    model.eval()
    size = sum(t.numel() * t.element_size() for t in model.state_dict().values()) / 1024
    torch.export.export(nn.Linear(1, 1), (torch.zeros(1, 1),))
    forwards = []
    for _ in range(4):
        start = time.process_time()
        with torch.no_grad():
            model(**example) if isinstance(example, dict) else model(*example)
        forwards.append(time.process_time() - start)
    before, start = _peak(), time.process_time()
    gated = l0.attach(model, example, where=l0.shrinkable(inputs=False))  # hidden units alone, in every network
    attached, attach_memory = time.process_time() - start, (_peak() - before) / size
    l0.finalize(gated, 0.7, cost=l0.macs)
    start = time.process_time()
    small = l0.compact(gated)
    compacted = time.process_time() - start
    left = sum(p.numel() for p in small.parameters()) / sum(p.numel() for p in model.parameters())
    numbers = {"parameters": float(sum(p.numel() for p in model.parameters())), "left": left}
    times = {"forward_s": min(forwards), "attach_s": attached, "compact_s": compacted}
    return numbers | times | {"attach_memory": attach_memory, "memory": (_peak() - before) / size}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB


def told(name: str, found: dict[str, float]) -> str:
    forward, attach, compact = found["forward_s"], found["attach_s"], found["compact_s"]
    return (
        f"{name}: {found['parameters'] / 1e6:.1f} M parameters, forward {forward:.3f} s; "
        f"attach {attach:.1f} s = {max(0.0, attach - 5) / forward:.0f} forwards + 5 s (goal 8) and "
        f"{found['attach_memory']:.1f} x its memory (goal 3); "
        f"compact {compact:.1f} s = {max(0.0, compact - 2) / forward:.0f} forwards + 2 s (goal 4)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="which networks")
    parser.add_argument("--here", choices=NETWORKS, help="one network, in this process, its numbers as JSON")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measured(options.here)))
        return
    found = {}
    for name in options.only:
        command = [sys.executable, __file__, "--here", name]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        found[name] = json.loads(ran.stdout.splitlines()[-1])
        print(told(name, found[name]), flush=True)
    if options.json:
        write(options.json, "attach_compact", {"networks": found}, {"only": options.only})


if __name__ == "__main__":
    main()
