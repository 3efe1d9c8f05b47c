"""Rows of transactions and participants, in SQLite or PostgreSQL, behind one interface.

rows        the rows as values, and what a backend must offer
schema      the tables, as SQLAlchemy MetaData: the one source of the schema; creating and checking them
sqlite      the hot path on SQLite: one file, one coordinator
postgres    the hot path on PostgreSQL: any number of coordinators on one database
store       the asyncio face of a backend: threads, lost connections, running again
"""
