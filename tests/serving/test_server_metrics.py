"""What /metrics counts."""

import asyncio

import httpx

from thinker.serving.app import Service, create_app
from thinker.serving.server_metrics import Metrics


def test_a_failure_of_the_server_counts_as_500():
    metrics = Metrics()
    app = create_app(Service({"broken": None}, metrics, page=""), [])

    async def ask():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=60
        ) as client:
            return await client.get("/v1/models")

    assert asyncio.run(ask()).status_code == 500  # None cannot be described
    counted = [line for line in metrics.text().decode().splitlines() if "/v1/models" in line]
    assert counted == ['thinker_requests_total{path="/v1/models",status="500"} 1.0']
