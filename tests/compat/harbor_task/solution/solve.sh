#!/bin/bash
set -euo pipefail
{
  head -n 1 "$ORDERS"
  tail -n +2 "$ORDERS" | awk -F, '{ sum[$1] += $2 } END { for (name in sum) print name "," sum[name] }' |
    sort -t, -k2,2nr -k1,1
} > /work/totals.csv
