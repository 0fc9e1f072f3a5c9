-- SPDX-FileCopyrightText: The stormguard authors
-- SPDX-License-Identifier: Apache-2.0

-- One decision about the bucket KEYS[1]. ARGV: rate, burst, the least and the most
-- tokens to take, tokens to put back. Returns how many it took (0, or least to
-- most), for how many microseconds there will not be the least, and what is left.
--
-- A bucket is "LEVEL MICROSECONDS", by this server's clock; none is a full one, and
-- it is kept until it would be full. A clock that is set back mints nothing for the
-- time that it passes again.

local rate, burst = tonumber(ARGV[1]), tonumber(ARGV[2])
local least, most, back = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local level = burst
local was = redis.call('GET', KEYS[1])
if was then
  local had, at = string.match(was, '^([%d.e+-]+) (%d+)$')
  had, at = tonumber(had), tonumber(at)
  if not had or not at then
    return redis.error_reply('WRONGTYPE the key holds something that is no bucket')
  end
  level = had + math.max(0, now - at) * rate / 1000000
end
level = math.min(burst, level + back)

local took, wait = 0, 0
if level >= least then
  took = math.min(most, math.floor(level))
  level = level - took
else
  wait = math.ceil((least - level) / rate * 1000000)
end

if level < burst then
  local full = math.ceil((burst - level) / rate * 1000) + 1000
  redis.call('SET', KEYS[1], string.format('%.17g %.0f', level, now), 'PX', string.format('%.0f', full))
elseif was then
  redis.call('DEL', KEYS[1])
end
return {took, wait, math.floor(level)}
