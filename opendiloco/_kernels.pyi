# The compiled module, as opendiloco.kernels uses it. Addresses are integers; native/kernels.h says what each does.
from collections.abc import Sequence

from typing_extensions import Buffer

class _Characters: ...

class _Doubles:
    def __getitem__(self, place: int) -> float: ...

class _FFI:
    def new(self, cdecl: str) -> _Doubles: ...
    def from_buffer(self, python_buffer: Buffer) -> object: ...
    def cast(self, cdecl: str, source: object) -> int: ...
    def string(self, characters: _Characters) -> bytes: ...

class _Library:
    def diloco_format_name(self, format: int) -> _Characters: ...
    def diloco_block_values(self, format: int) -> int: ...
    def diloco_block_bytes(self, format: int) -> int: ...
    def diloco_format_is_stochastic(self, format: int) -> int: ...
    def diloco_payload_size(self, format: int, count: int) -> int: ...
    def diloco_choose_kernels(self, name: bytes) -> int: ...
    def diloco_kernels_are_supported(self, name: bytes) -> int: ...
    def diloco_kernels_name(self) -> _Characters: ...
    def diloco_quantize(
        self,
        format: int,
        is_stochastic: bool,
        seed: int,
        first_block: int,
        values: int,
        count: int,
        payload: int,
        threads: int,
    ) -> int: ...
    def diloco_quantize_difference(
        self,
        format: int,
        is_stochastic: bool,
        seed: int,
        first_block: int,
        theta: int,
        local: int,
        local_is_bfloat16: bool,
        residual: int,
        count: int,
        payload: int,
        threads: int,
    ) -> int: ...
    def diloco_finish_average(
        self,
        format: int,
        is_stochastic: bool,
        seed: int,
        first_block: int,
        accumulator: int,
        total_weight: float,
        count: int,
        payload: int,
        threads: int,
    ) -> int: ...
    def diloco_average(
        self,
        format: int,
        is_stochastic: bool,
        seed: int,
        first_block: int,
        payloads: Sequence[int],
        weights: Sequence[float],
        payload_count: int,
        total_weight: float,
        count: int,
        payload: int,
        threads: int,
    ) -> int: ...
    def diloco_check_payload(self, format: int, payload: int, count: int, threads: int) -> int: ...
    def diloco_squared_norm(self, format: int, payload: int, count: int, squared: _Doubles) -> int: ...
    def diloco_dequantize(self, format: int, payload: int, count: int, values: int, threads: int) -> int: ...
    def diloco_accumulate(
        self, format: int, payload: int, weight: float, count: int, accumulator: int, threads: int
    ) -> int: ...
    def diloco_outer_step(
        self,
        format: int,
        payload: int,
        theta: int,
        momentum: int,
        count: int,
        learning_rate: float,
        mu: float,
        threads: int,
    ) -> int: ...

ffi: _FFI
lib: _Library
