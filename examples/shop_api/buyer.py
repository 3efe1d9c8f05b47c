"""A customer who double-clicks and retries: two requests per intent at once, each sent until it is answered."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import Any, Final

import httpx

from participant_sdk.idempotency import AsyncRetryTransport, RetryPolicy, intent

PATIENT: Final = RetryPolicy(
    attempts_max=1_000, total_s=300.0, cap_s=1.0, retry_internal=True, budget_share=100.0, budget_burst=10_000
)
"""A person would give up sooner; whoever wants to see that every intent is answered does not."""


@dataclass(frozen=True)
class Bought:
    """One order, and how often its requests were sent: 6 times if nothing went wrong."""

    reference: str
    order: str
    charge: str
    label: str
    sent: int


class Buyer:
    """One customer at one shop; an async context manager."""

    def __init__(
        self, url: str, customer: str, policy: RetryPolicy = PATIENT, verify: ssl.SSLContext | bool = True
    ) -> None:
        self.customer = customer
        self._sent = 0
        self._http = httpx.AsyncClient(
            base_url=url,
            transport=AsyncRetryTransport(httpx.AsyncHTTPTransport(verify=verify), policy),
            timeout=httpx.Timeout(30.0, pool=120.0),
            headers={"Authorization": f"Bearer secret-of-{customer}"},
        )

    async def __aenter__(self) -> Buyer:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._http.aclose()

    async def twice(self, path: str, body: dict[str, Any], key: str | None = None) -> httpx.Response:
        """One intent: the request is sent twice at once, with one key. Raises RuntimeError if the answers differ."""
        with intent(key):
            first, second = await asyncio.gather(self._http.post(path, json=body), self._http.post(path, json=body))
        self._sent += first.extensions["tricord_attempts"] + second.extensions["tricord_attempts"]
        if (first.status_code, first.content) != (second.status_code, second.content):
            raise RuntimeError(f"two answers to one intent: {first.status_code} {first.text}, {second.text}")
        return first

    async def buy(self, reference: str, card: str = "4242") -> Bought:
        """Order some tea, pay it, have a label printed; again with the same reference, it is the same order.

        Raises httpx.HTTPStatusError.
        """
        before = self._sent
        wanted = {"sku": "tea", "quantity": 2, "reference": reference}
        made = (await self.twice("/orders", wanted, f"order-{reference}")).raise_for_status().json()
        order, payment = made["order"], {"card": card, "cents": made["total"]}
        paid = await self.twice(f"/orders/{order}/payment", payment, f"pay-{reference}")
        printed = await self.twice(f"/orders/{order}/labels", {}, f"label-{reference}")
        charge, label = paid.raise_for_status().json()["charge"], printed.raise_for_status().json()["label"]
        return Bought(reference, order, charge, label, self._sent - before)
