"""Converters from public formats. Each reads its source as a stream of items and can go on from a cursor."""

from .base import CONVERTERS, ConvertReport, convert

__all__ = ["CONVERTERS", "ConvertReport", "convert"]
