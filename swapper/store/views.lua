--[[
The reading half of the library: appended to library.lua, whose text tells the layout, and loaded with it as one.

Invariant: nothing here writes (the server holds the functions to it), so they also answer while it refuses writes.
]]

local HEADS = 256

-- The leases a decision may need: held, named by a card, heads of each queue, timed, past their deadline.
local function wanted_leases(p, now)
  local ids, seen = {}, {}
  local function add(list)
    for _, id in ipairs(list) do
      if not seen[id] then
        seen[id] = true
        ids[#ids + 1] = id
      end
    end
  end
  add(redis.call('ZRANGE', p .. ':held', 0, -1))
  for _, holds in ipairs(redis.call('HVALS', p .. ':holds')) do
    for id in string.gmatch(holds, '[^ ]+') do add({ id }) end
  end
  -- Those whose time is still ahead do not use up the heads.
  local ahead = math.min(redis.call('ZCOUNT', p .. ':timed', '(' .. int(now), '+inf'), 4096)
  add(redis.call('ZRANGE', p .. ':timed', 0, HEADS - 1))
  for _, card in ipairs(redis.call('SMEMBERS', p .. ':queues')) do
    local heads, taken = redis.call('ZRANGE', p .. ':queue:' .. card, 0, HEADS + ahead - 1), 0
    for _, id in ipairs(heads) do
      if taken == HEADS then break end
      local start = ahead > 0 and redis.call('ZSCORE', p .. ':timed', id)
      if not start or tonumber(start) <= now then
        taken = taken + 1
        add({ id })
      end
    end
  end
  add(redis.call('ZRANGEBYSCORE', p .. ':deadlines', '-inf', int(now), 'LIMIT', 0, 1000))
  return ids
end

-- The earliest time still ahead at which something is due, '' for none.
local function next_due(p, now)
  local due = nil
  for _, key in ipairs({ ':ends', ':deadlines', ':timed', ':gateways' }) do
    local first = redis.call('ZRANGEBYSCORE', p .. key, '(' .. int(now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    if first[2] and (due == nil or tonumber(first[2]) < due) then due = tonumber(first[2]) end
  end
  return due and int(due) or ''
end

-- now -> now, cards, leases (after-image, expires_ms, progress), queued, next due, gateways, demand documents, gates,
-- the counter of tokens, the steps of the clock, the errands in the order they came
local function read(keys, a)
  local p, now = keys[1], clock(a[1])
  local leases, demand, errands = {}, {}, {}
  for _, id in ipairs(wanted_leases(p, now)) do
    local lease = redis.call('HMGET', p .. ':lease:' .. id, 'image', 'expires_ms', 'progress')
    if lease[1] then leases[#leases + 1] = { lease[1], lease[2] or '', lease[3] or '' } end
  end
  local gateways = redis.call('ZRANGEBYSCORE', p .. ':gateways', '(' .. int(now), '+inf')
  for _, gateway in ipairs(gateways) do demand[#demand + 1] = redis.call('HGET', p .. ':demand', gateway) or '[]' end
  for i, id in ipairs(redis.call('ZRANGE', p .. ':errands', 0, -1)) do
    errands[i] = redis.call('GET', p .. ':errand:' .. id)
  end
  return {
    int(now), redis.call('HVALS', p .. ':cards'), leases, int(redis.call('ZCARD', p .. ':queue')), next_due(p, now),
    gateways, demand, redis.call('HGETALL', p .. ':gates'), redis.call('GET', p .. ':token') or '0',
    redis.call('GET', p .. ':stepped') or '0', errands,
  }
end

-- state card owner limit before (a seq, exclusive; '' = newest) -> where the scan stopped ('' = at the end), leases
local function list(keys, a)
  local p, found, limit, last = keys[1], {}, tonumber(a[4]), ''
  local below = a[5] == '' and '+inf' or '(' .. a[5]
  local page = redis.call('ZREVRANGEBYSCORE', p .. ':leases', below, '-inf', 'WITHSCORES', 'LIMIT', 0, 1000)
  for i = 1, #page, 2 do
    if #found == limit then return { last, found } end
    last = page[i + 1]
    local lease = redis.call('HMGET', p .. ':lease:' .. page[i], 'state', 'card', 'owner')
    local fits = (a[1] == '' or a[1] == lease[1]) and (a[2] == '' or a[2] == lease[2])
    if fits and (a[3] == '' or a[3] == lease[3]) then found[#found + 1] = flat(p, page[i]) end
  end
  return { #page == 2000 and last or '', found }
end

-- limit card ('' = every) -> documents, newest first
local function swaps(keys, a)
  local p, found = keys[1], {}
  for _, id in ipairs(redis.call('ZREVRANGE', p .. ':swaps', 0, -1)) do
    if #found == tonumber(a[1]) then break end
    local swap = redis.call('HMGET', p .. ':swap:' .. id, 'doc', 'card')
    if swap[1] and (a[2] == '' or a[2] == swap[2]) then found[#found + 1] = swap[1] end
  end
  return found
end

local function reading(name, callback)
  redis.register_function({ function_name = name, callback = callback, flags = { 'no-writes' } })
end

reading('swapper_1_read', read)
reading('swapper_1_list', list)
reading('swapper_1_swaps', swaps)
