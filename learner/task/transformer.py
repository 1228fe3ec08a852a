"""Built-in model: a decoder-only transformer over bytes, small enough to learn something on a laptop in a minute.

Pre-norm blocks of causal attention (rotary positions, normalised queries and keys, heads of 32 channels) and SwiGLU.
A single byte carries little information, so each position starts from the embeddings of its own byte and of the bytes
just before it: a cheap look-up that saves the first layers from having to learn bigrams and trigrams.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention, silu

from ...common.config import TaskSettings

VOCABULARY = 256
HEAD_CHANNELS = 32
CONTEXT_BYTES = 3
"""Number of bytes whose embeddings are added at each position: its own and those before it."""


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.query_norm = nn.RMSNorm(HEAD_CHANNELS, eps=1e-6)
        self.key_norm = nn.RMSNorm(HEAD_CHANNELS, eps=1e-6)

    def forward(self, x: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
        """`x` [sequences, length, width] -> the same shape."""
        q, k, v = (part(x).unflatten(-1, (-1, HEAD_CHANNELS)).transpose(1, 2) for part in self._inputs())
        q, k = _rotate(self.query_norm(q), rotations), _rotate(self.key_norm(k), rotations)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]

    def _inputs(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.query, self.key, self.value


class SwiGLU(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = width * 8 // 3 // 32 * 32
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(width)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.mlp = SwiGLU(width)

    def forward(self, x: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotations)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """`forward`: bytes int64 [sequences, length] -> logits f32 [sequences, length, 256], length <= sequence_length.

    The parameters are a function of `task` and `seed` alone, so all learners start from the same model.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, task: TaskSettings, seed: int) -> None:
        super().__init__()
        self.sequence_length = task.sequence_length
        self.embeddings = nn.ModuleList(nn.Embedding(VOCABULARY, task.width) for _ in range(CONTEXT_BYTES))
        self.embedding_norm = nn.RMSNorm(task.width, eps=1e-6)
        self.blocks = nn.ModuleList(Block(task.width) for _ in range(task.layers))
        self.head_norm = nn.RMSNorm(task.width, eps=1e-6)
        self.head = nn.Linear(task.width, VOCABULARY, bias=False)
        half = torch.arange(HEAD_CHANNELS // 2, dtype=torch.float32, device="cpu") / (HEAD_CHANNELS // 2)
        places = torch.arange(task.sequence_length, dtype=torch.float32, device="cpu")
        angles = places[:, None] * 10_000.0**-half
        # not persistent: computed from the settings, so neither sent nor exported
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, random: torch.Generator) -> None:
        """Initialize head and branches to zero, so that the first loss is that of a uniform guess: log 256."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.startswith("embeddings."):
                    parameter.normal_(std=0.02, generator=random)
                elif name.endswith(("out.weight", "down.weight", "head.weight")):
                    parameter.zero_()
                elif parameter.ndim == 2:
                    parameter.normal_(std=0.7 / math.sqrt(parameter.shape[1]), generator=random)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embeddings[0](tokens)
        for back, embedding in enumerate(self.embeddings[1:], start=1):
            x = x + embedding(pad(tokens, (back, 0))[:, :length])
        x = self.embedding_norm(x)
        for block in self.blocks:
            x = block(x, (self.cos[:length], self.sin[:length]))
        return self.head(self.head_norm(x))  # type: ignore[no-any-return]


def _rotate(x: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions (arXiv 2104.09864) on `x` [..., length, channels]: channel i rotates together with i + half."""
    cos, sin = rotations
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean nats per byte of `targets` int64 [sequences, length] given `inputs` of the same shape; a scalar."""
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def sample(model: Transformer, prompt: bytes, count: int, temperature: float = 0.8, seed: int = 0) -> bytes:
    """Sample `count` bytes after `prompt` (which is not part of the result); a function of `seed`.

    The model sees the last `sequence_length` bytes. Temperature 0 takes the most likely byte each time. An empty prompt
    represents a newline.
    """
    device = next(model.parameters()).device
    random = torch.Generator().manual_seed(seed)
    text = list(prompt or b"\n")
    written = len(text)
    for _ in range(count):
        seen = torch.tensor([text[-model.sequence_length :]], dtype=torch.int64, device=device)
        logits = model(seen)[0, -1].float().cpu()
        if temperature > 0:
            choice = torch.multinomial((logits / temperature).softmax(0), 1, generator=random)
        else:
            choice = logits.argmax()
        text.append(int(choice))
    return bytes(text[written:])
