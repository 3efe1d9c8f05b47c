"""A shop on FastAPI that is a web service and a participant in one process and one event loop.

    stock   the participant: ORM, `async def` handlers, the shop's database
    app     the web service: orders are transactions over the stock and a bank

It needs a coordinator and the bank of `examples.transfer`; each in a terminal of its own:

    tricord serve --store coordinator.db
    python -m examples.transfer.bank --name bank-a --listen 127.0.0.1:7802 --coordinator 127.0.0.1:7800 \\
        --database sqlite:///bank-a.db --accounts alice=10000,shop=0
    uvicorn --factory examples.fastapi_shop.app:create_app --port 8000

Then:

    curl http://127.0.0.1:8000/stock/tea
    curl -X POST http://127.0.0.1:8000/orders -H 'Content-Type: application/json' -H 'Idempotency-Key: order-1' \\
        -d '{"sku": "tea", "quantity": 2, "total": 900, "account": "alice"}'

Settings, as environment variables:

    SHOP_DATABASE      sqlite+aiosqlite:///shop.db, or postgresql+psycopg://user@host/database
    SHOP_LISTEN        127.0.0.1:7801, where the participant listens; one process can, so not uvicorn's --workers
    SHOP_COORDINATOR   127.0.0.1:7800
    SHOP_BANK          bank-a, the participant that holds the customers' accounts and the shop's
    SHOP_PATIENCE      10, seconds that a customer waits for an answer before it is "not known yet" (202)
"""
