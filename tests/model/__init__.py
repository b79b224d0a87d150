"""The protocol as models for Spin, and what checks them."""
