"""OpenAI-compatible HTTP endpoint of a model that serves; needs the extra `endpoint` (starlette, uvicorn)."""
