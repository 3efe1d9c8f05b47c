"""A shop's HTTP API that is safe to repeat: orders, payments at somebody else's service, shipping labels.

    tables     the shop's tables
    app        the API: an order is ATOMIC, a label LEASED, a payment PHASED
    provider   the payment provider, a program of its own with its own idempotency keys; it can lose answers
    buyer      a customer who double-clicks and retries

Each in a terminal of its own; for a quick start on SQLite files in the current folder:

    python -m examples.shop_api provider --loses 0.3
    python -m examples.shop_api serve
    python -m examples.shop_api buy --customer alice --orders 5

On PostgreSQL, with several processes behind one address:

    python -m examples.shop_api serve --database postgresql+psycopg://user@host/database --workers 4

Or by hand; the second call prints the first one's answer:

    curl -i -X POST http://127.0.0.1:8000/orders -H 'Authorization: Bearer secret-of-alice' \\
        -H 'Content-Type: application/json' -H 'Idempotency-Key: order-1' -d '{"sku": "tea", "quantity": 2}'
"""
