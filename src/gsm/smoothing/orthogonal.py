"""Orthogonal matrices that spread a spike over all channels: Hadamard where one can be built, random otherwise."""

from __future__ import annotations

import torch
from torch import Tensor


def spreading_matrix(n: int, seed: int = 0) -> Tensor:
    """An orthogonal [n, n] float64 matrix with entries as equal in size as possible and random signs.

    n = m * 2^k: a Sylvester matrix of 2^k, times a Paley matrix of m (or of m * 2^j) where that exists, times a random
    orthogonal matrix of m otherwise. The random signs keep the first column from adding all channels up.
    """
    generator = torch.Generator().manual_seed(seed)
    matrix = _hadamard_like(n, generator)
    signs = torch.randint(0, 2, (n,), generator=generator, dtype=torch.float64) * 2 - 1
    return signs[:, None] * matrix


def sylvester(n: int) -> Tensor:
    """The orthonormal Hadamard matrix of a power of two, float64; the one that the fast transform computes."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / n**0.5


def largest_power_of_two(n: int) -> int:
    """The largest power of two that divides ``n``."""
    return n & -n


def _hadamard_like(n: int, generator: torch.Generator) -> Tensor:
    power = largest_power_of_two(n)
    odd = n // power
    if odd == 1:
        return sylvester(n)
    factor = 1
    while factor <= min(power, 16):
        small = paley(odd * factor)
        if small is not None:
            return torch.kron(small, sylvester(power // factor))
        factor *= 2
    random = torch.randn(odd, odd, generator=generator, dtype=torch.float64)
    return torch.kron(torch.linalg.qr(random).Q.contiguous(), sylvester(power))


def paley(n: int) -> Tensor | None:
    """An orthonormal Hadamard matrix of order ``n`` by Paley's constructions over a prime field, or None.

    I: n = q + 1 with q = 3 mod 4. II: n = 2 (q + 1) with q = 1 mod 4. (Paley, "On orthogonal matrices", 1933.)
    """
    q = n - 1
    if _is_prime(q) and q % 4 == 3:
        border = torch.nn.functional.pad(_jacobsthal(q), (1, 0, 1, 0), value=1.0)
        border[1:, 0], border[0, 0] = -1.0, 0.0
        return (border + torch.eye(n, dtype=torch.float64)) / n**0.5
    q = n // 2 - 1
    if n % 2 == 0 and _is_prime(q) and q % 4 == 1:
        conference = torch.nn.functional.pad(_jacobsthal(q), (1, 0, 1, 0), value=1.0)
        conference[0, 0] = 0.0
        plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        minus = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return (torch.kron(conference, plus) + torch.kron(torch.eye(n // 2, dtype=torch.float64), minus)) / n**0.5
    return None


def _jacobsthal(q: int) -> Tensor:
    """Q[i, j] = the quadratic character of i - j modulo the prime ``q``."""
    squares = {i * i % q for i in range(1, q)}
    character = torch.tensor([0.0] + [1.0 if i in squares else -1.0 for i in range(1, q)], dtype=torch.float64)
    index = torch.arange(q)
    return character[(index[:, None] - index[None, :]) % q]


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % i for i in range(2, int(n**0.5) + 1))
