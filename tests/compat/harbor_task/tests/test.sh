#!/bin/bash
# The reward is 1 only for the exact table, in an environment that was built as the Dockerfile says.
expected='customer,cents
ansel,1249
mira,1249
tove,1050
juno,5'
reward=0
if [ "$(cat /work/totals.csv 2>/dev/null)" = "$expected" ] &&
  [ "$ORDERS" = /work/orders.csv ] && [ "$(cat /work/shop)" = "the yard shop" ] && [ "$PWD" = /work ]; then
  reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
