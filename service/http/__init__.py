"""The HTTP half of the service: one ASGI application under /v1, and the door that every request passes."""
