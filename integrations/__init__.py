"""The rooms that know other people's interfaces: vLLM, HTTP, Ray and the trainers."""

from rollout_sched.integrations import advantages, token_columns

__all__ = ["advantages", "token_columns"]
