#!lua name=swapper_1
--[[
The store's one function library: every write of the store is one call of one function here, and is atomic. What
only reads is in views.lua, loaded with it.

Invariant: a function checks everything first and writes afterwards, so that it changes all it says or nothing. The
library never chooses (no function picks a lease or a card) and never re-encodes a document it was given.

Keys. Everything lives under one prefix P with a hash tag, `{swapper}` by default; P is the only key a call names.
  P:lease:ID        hash: a lease, flat, every value a string; a field that is None is absent. Besides the fields of
                    Lease there are those this library needs of its request: rank ttl_ms max_hold_ms not_before_ms
                    deadline_ms owner asked (the card asked for); rev counts its changes, and image is its last after-image.
                    `request` is the LeaseRequest as a JSON document, opaque here.
  P:leases          zset seq: every lease there is          P:seq        the arrival counter
  P:queue           zset rank * 2^44 + seq: who waits       P:queue:CARD (`*`: any card) the same for one card asked for
  P:queues          set: the CARDs for which P:queue:CARD exists
  P:held            zset seq: preparing and granted         P:finals     zset ended_ms: the ended ones, 10,000 kept
  P:timed           zset not_before_ms: who waits for a time, its start still ahead or just passed
  P:deadlines       zset deadline_ms: queued and preparing
  P:ends            zset ms: `e:ID` expiry, `h:ID` end of max_hold, `r:ID` revocation; granted leases
  P:idem:N:OWNER:K  hash lease, digest, until: an Idempotency-Key (N = length of OWNER), gone after 24 h
  P:cards           hash name -> Card document              P:versions   hash name -> version
  P:holds           hash name -> ids of the leases that hold or prepare the card, a space between two
  P:swap:ID         hash doc, card, v                       P:swaps      zset: order of birth (P:births), 1,000 kept
  P:gates           hash tenant -> `EPOCH:0|1`              P:token      the one counter of tokens
  P:stepped         ms: how far the clock was stepped in all, as far as the records have followed
  P:agent:EXECUTOR  hash owner, who, ends, floor: the one agent that obeys as this executor; it stays when it has ended;
                    note: how far its owner has come, opaque here
  P:errand:ID       an Errand document                      P:errands    zset: those not over, in order (P:asked)
  P:gateways        zset: when each membership ends, ms     P:demand     hash gateway -> its Demand records, a document
  P:inputs          stream for the coordinator: r = a list of Reports, a document, or w = look again
  P:out:EXECUTOR    stream of Command documents (c), gone a week after the last
  P:events          stream of t type, s subject, v version, d after-image; folding it gives the state

Numbers that may exceed 2^53 (tokens) stay strings; the rest are exact in a double. `now` is milliseconds, or '' for
the server's TIME. The after-image of a lease leaves out expires_ms and progress, which heartbeats move silently.
]]

local EVENTS, INPUTS, OUTBOX, FINALS, SWAPS = '10000', '10000', '1000', 10000, 1000
local DAY_MS, CLASS_STEP = 86400000, 17592186044416
local RELEASED, CANCELLED = 'given back by its holder', 'given up before it was granted'

-- from -> to; a state absent on the left is final.
local LIFE = {
  queued = { preparing = true, granted = true, cancelled = true, expired = true, failed = true },
  preparing = { queued = true, granted = true, cancelled = true, expired = true, failed = true },
  granted = { released = true, expired = true, revoked = true },
}

-- The after-image: field, and whether its stored text is JSON as it stands.
local IMAGE = {
  { 'id' }, { 'request', true }, { 'seq', true }, { 'created_ms', true }, { 'state' }, { 'card' }, { 'reason' },
  { 'token' }, { 'granted_ms', true }, { 'ended_ms', true }, { 'revoke_ms', true }, { 'swap_id' }, { 'explain' },
}

local function int(number)
  return string.format('%.0f', number)
end

local function clock(now)
  if now ~= '' then return tonumber(now) end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- a < b for decimal strings of any length without sign or leading zeros.
local function less(a, b)
  if #a ~= #b then return #a < #b end
  return a < b
end

local function some(text)
  if text == nil or text == false or text == '' then return nil end
  return text
end

local function wake(p)
  redis.call('XADD', p .. ':inputs', 'MAXLEN', '~', INPUTS, '*', 'w', '1')
end

local function emit(p, kind, subject, version, data)
  redis.call('XADD', p .. ':events', 'MAXLEN', '~', EVENTS, '*', 't', kind, 's', subject, 'v', version, 'd', data)
end

local function flat(p, id)
  return redis.call('HGETALL', p .. ':lease:' .. id)
end

-- The lease as a table, or nil.
local function fetch(p, id)
  local pairs_ = flat(p, id)
  if #pairs_ == 0 then return nil end
  local lease = {}
  for i = 1, #pairs_, 2 do lease[pairs_[i]] = pairs_[i + 1] end
  return lease
end

local function image(lease)
  local parts = {}
  for i, entry in ipairs(IMAGE) do
    local value = lease[entry[1]]
    if value == nil then value = 'null' elseif not entry[2] then value = cjson.encode(value) end
    parts[i] = '"' .. entry[1] .. '":' .. value
  end
  return '{' .. table.concat(parts, ',') .. '}'
end

local function keep(key, member, score)
  if score then redis.call('ZADD', key, int(score), member) else redis.call('ZREM', key, member) end
end

local function forget_oldest(p)
  local extra = redis.call('ZCARD', p .. ':finals') - FINALS
  if extra <= 0 then return end
  for _, id in ipairs(redis.call('ZRANGE', p .. ':finals', 0, math.min(extra, 100) - 1)) do
    redis.call('DEL', p .. ':lease:' .. id)
    redis.call('ZREM', p .. ':leases', id)
    redis.call('ZREM', p .. ':finals', id)
  end
end

-- Put the lease into the indexes its state calls for, and out of the others.
local function place(p, lease)
  local id, seq = lease.id, tonumber(lease.seq)
  local queued, granted = lease.state == 'queued', lease.state == 'granted'
  local waiting = queued or lease.state == 'preparing'
  local asked = lease.asked or '*'
  local order = queued and tonumber(lease.rank) * CLASS_STEP + seq
  keep(p .. ':queue', id, order)
  keep(p .. ':queue:' .. asked, id, order)
  if queued then
    redis.call('SADD', p .. ':queues', asked)
  elseif redis.call('EXISTS', p .. ':queue:' .. asked) == 0 then
    redis.call('SREM', p .. ':queues', asked)
  end
  keep(p .. ':timed', id, queued and tonumber(lease.not_before_ms))
  keep(p .. ':deadlines', id, waiting and tonumber(lease.deadline_ms))
  keep(p .. ':held', id, LIFE[lease.state] and not queued and seq)
  keep(p .. ':ends', 'e:' .. id, granted and tonumber(lease.expires_ms))
  keep(p .. ':ends', 'h:' .. id, granted and tonumber(lease.granted_ms) + tonumber(lease.max_hold_ms))
  keep(p .. ':ends', 'r:' .. id, granted and tonumber(lease.revoke_ms))
  keep(p .. ':finals', id, not LIFE[lease.state] and tonumber(lease.ended_ms))
end

-- Write the fields, keep the indexes right, tell the log.
local function change(p, lease, fields)
  fields.rev = int((tonumber(lease.rev) or 0) + 1)
  local write = {}
  for field, value in pairs(fields) do
    lease[field] = value
    write[#write + 1] = field
    write[#write + 1] = value
  end
  local after = image(lease)
  write[#write + 1] = 'image'
  write[#write + 1] = after
  redis.call('HSET', p .. ':lease:' .. lease.id, unpack(write))
  place(p, lease)
  emit(p, 'lease', lease.id, lease.rev, after)
  if not LIFE[lease.state] then forget_oldest(p) end
end

-- now id request owner asked rank ttl max_hold not_before deadline max_queue key digest
local function enqueue(keys, a)
  local p, now, id = keys[1], clock(a[1]), a[2]
  local idem = some(a[12]) and p .. ':idem:' .. #a[4] .. ':' .. a[4] .. ':' .. a[12]
  if idem then
    local seen = redis.call('HMGET', idem, 'lease', 'digest', 'until')
    if seen[1] and tonumber(seen[3]) > now and redis.call('EXISTS', p .. ':lease:' .. seen[1]) == 1 then
      if seen[2] ~= a[13] then return { 'reused', seen[1] } end
      return { 'existing', flat(p, seen[1]) }
    end
  end
  if redis.call('EXISTS', p .. ':lease:' .. id) == 1 then return { 'existing', flat(p, id) } end
  local queued = redis.call('ZCARD', p .. ':queue')
  if queued >= tonumber(a[11]) then return { 'full', int(queued) } end
  local seq = int(redis.call('INCR', p .. ':seq'))
  redis.call('ZADD', p .. ':leases', seq, id)
  change(p, { id = id, rev = '0' }, {
    id = id, request = a[3], seq = seq, created_ms = int(now), state = 'queued', owner = a[4], asked = some(a[5]),
    card = some(a[5]), rank = a[6], ttl_ms = a[7], max_hold_ms = a[8], not_before_ms = some(a[9]),
    deadline_ms = some(a[10]),
  })
  if idem then
    redis.call('DEL', idem)
    redis.call('HSET', idem, 'lease', id, 'digest', a[13], 'until', int(now + DAY_MS))
    redis.call('PEXPIRE', idem, int(DAY_MS))
  end
  wake(p)
  return { 'created', flat(p, id) }
end

-- now id token progress request ('' for as it is): where that is another, it names another process
local function heartbeat(keys, a)
  local p, now, lease = keys[1], clock(a[1]), fetch(keys[1], a[2])
  if not lease then return { 'missing' } end
  if not LIFE[lease.state] then return { 'ended', flat(p, a[2]) } end
  if lease.state ~= 'granted' or lease.token ~= a[3] then return { 'token' } end
  local expires = int(math.max(tonumber(lease.expires_ms), now + tonumber(lease.ttl_ms)))
  redis.call('HSET', p .. ':lease:' .. a[2], 'expires_ms', expires)
  if some(a[4]) then redis.call('HSET', p .. ':lease:' .. a[2], 'progress', a[4]) end
  if some(a[5]) and a[5] ~= lease.request then
    change(p, lease, { request = a[5], expires_ms = expires })
    wake(p)
  end
  redis.call('ZADD', p .. ':ends', expires, 'e:' .. a[2])
  return { 'ok', flat(p, a[2]) }
end

-- now id token
local function finish(keys, a)
  local p, now, lease = keys[1], clock(a[1]), fetch(keys[1], a[2])
  if not lease then return { 'missing' } end
  if not LIFE[lease.state] then return { 'ok', flat(p, a[2]) } end
  if lease.state == 'granted' and lease.token ~= a[3] then return { 'token' } end
  local held = lease.state == 'granted'
  change(p, lease, {
    state = held and 'released' or 'cancelled', ended_ms = int(now), reason = held and RELEASED or CANCELLED,
  })
  wake(p)
  return { 'ok', flat(p, a[2]) }
end

-- Why this change may not be made: a conflict's name, an error, or nothing.
local function refusal(lease, wanted, now)
  if not lease then return 'lease ' .. wanted.id end
  local expected = false
  for _, state in ipairs(wanted.expect) do expected = expected or state == lease.state end
  if not expected then return 'lease ' .. wanted.id end
  if wanted.only_if_expired and not (lease.expires_ms and tonumber(lease.expires_ms) <= now) then
    return 'lease ' .. wanted.id
  end
  local to = wanted.state
  if not to or to == lease.state then return nil end
  if not (LIFE[lease.state] and LIFE[lease.state][to]) then
    return nil, 'SWAPPER lease ' .. wanted.id .. ' cannot go from ' .. lease.state .. ' to ' .. to
  end
  if to == 'granted' and not (wanted.token or lease.token) then
    return nil, 'SWAPPER lease ' .. wanted.id .. ' cannot be granted without a token'
  end
  return nil
end

-- The times of a lease as they are after a step of the clock: what began lies never ahead.
local function shifted(lease, shift, now)
  if not shift then return {} end
  local fields = { created_ms = int(math.min(tonumber(lease.created_ms) + shift, now)) }
  if lease.granted_ms then fields.granted_ms = int(math.min(tonumber(lease.granted_ms) + shift, now)) end
  if lease.revoke_ms then fields.revoke_ms = int(tonumber(lease.revoke_ms) + shift) end
  return fields
end

local function apply(p, lease, wanted, now)
  local fields = shifted(lease, tonumber(wanted.shift_ms), now)
  for _, name in ipairs({ 'state', 'reason', 'token', 'card', 'swap_id', 'explain', 'revoke_ms' }) do
    fields[name] = wanted[name] or fields[name]
  end
  local expires = tonumber(lease.expires_ms)
  if wanted.state and wanted.state ~= lease.state then
    if wanted.state == 'granted' then
      fields.granted_ms = int(now)
      expires = now + tonumber(lease.ttl_ms)
    elseif wanted.state == 'queued' then
      fields.card = lease.asked
      if not lease.asked then
        lease.card = nil
        redis.call('HDEL', p .. ':lease:' .. lease.id, 'card')
      end
    elseif not LIFE[wanted.state] then
      fields.ended_ms = int(now)
    end
  end
  if wanted.lives_ms and expires then expires = now + tonumber(wanted.lives_ms) end
  fields.expires_ms = expires and int(expires)
  change(p, lease, fields)
end

local function write_documents(p, c)
  for _, card in ipairs(c.cards) do
    local version = int(tonumber(card.version) + 1)
    redis.call('HSET', p .. ':cards', card.name, card.doc)
    redis.call('HSET', p .. ':versions', card.name, version)
    redis.call('HSET', p .. ':holds', card.name, card.holds)
    emit(p, 'card', card.name, version, card.doc)
  end
  for _, swap in ipairs(c.swaps) do
    local key = p .. ':swap:' .. swap.id
    redis.call('HSET', key, 'doc', swap.doc, 'card', swap.card)
    local version = int(redis.call('HINCRBY', key, 'v', 1))
    if version == '1' then
      redis.call('ZADD', p .. ':swaps', int(redis.call('INCR', p .. ':births')), swap.id)
      for _, old in ipairs(redis.call('ZRANGE', p .. ':swaps', 0, -(SWAPS + 1))) do
        redis.call('DEL', p .. ':swap:' .. old)
        redis.call('ZREM', p .. ':swaps', old)
      end
    end
    emit(p, 'swap', swap.id, version, swap.doc)
  end
  for _, gate in ipairs(c.gates) do
    redis.call('HSET', p .. ':gates', gate.tenant, gate.epoch .. ':' .. gate.open)
    emit(p, 'tenant', gate.tenant, gate.epoch, gate.doc)
  end
  for _, command in ipairs(c.commands) do
    local key = p .. ':out:' .. command.executor
    redis.call('XADD', key, 'MAXLEN', '~', OUTBOX, '*', 'c', command.doc)
    redis.call('PEXPIRE', key, int(7 * DAY_MS))
  end
  for _, said in ipairs(c.said) do emit(p, said.type, said.subject, '0', said.doc) end
end

-- Memberships that have not ended, by the clock before a step ahead or after it, last so long from now.
local function renew_members(p, now, step, lasts)
  local since = now - math.max(step, 0)
  for _, gateway in ipairs(redis.call('ZRANGEBYSCORE', p .. ':gateways', '(' .. int(since), '+inf')) do
    redis.call('ZADD', p .. ':gateways', int(now + lasts), gateway)
  end
end

-- Whether the clock shows what the decision takes it to show, its steps counted.
local function clock_moved(p, now, c)
  if c.between[1] and (now < tonumber(c.between[1]) or now > tonumber(c.between[2])) then return true end
  return c.stepped[1] and (redis.call('GET', p .. ':stepped') or '0') ~= c.stepped[1]
end

-- now commit (JSON; every value in it a string)
local function commit(keys, a)
  local p, now, c = keys[1], clock(a[1]), cjson.decode(a[2])
  if clock_moved(p, now, c) then return { 'conflict', 'clock' } end
  for _, card in ipairs(c.cards) do
    local version = redis.call('HGET', p .. ':versions', card.name) or '0'
    if version ~= card.version then return { 'conflict', 'card ' .. card.name } end
  end
  for _, gate in ipairs(c.gates) do
    local epoch, open = string.match(redis.call('HGET', p .. ':gates', gate.tenant) or '', '^(%d+):(%d)$')
    if epoch and (less(gate.epoch, epoch) or (gate.epoch == epoch and gate.open ~= open)) then
      return { 'conflict', 'gate ' .. gate.tenant }
    end
  end
  for _, id in ipairs(c.over) do
    if not redis.call('ZSCORE', p .. ':errands', id) then return { 'conflict', 'errand ' .. id } end
  end
  if c.tokens[1] and not less(redis.call('GET', p .. ':token') or '0', c.tokens[1]) then
    return { 'conflict', 'tokens' }
  end
  local leases = {}
  for i, wanted in ipairs(c.leases) do
    leases[i] = fetch(p, wanted.id)
    local conflict, mistake = refusal(leases[i], wanted, now)
    if mistake then return redis.error_reply(mistake) end
    if conflict then return { 'conflict', conflict } end
  end
  if c.tokens[1] then redis.call('SET', p .. ':token', c.tokens[#c.tokens]) end
  if c.stepped[1] then redis.call('SET', p .. ':stepped', c.stepped[2]) end
  if c.members ~= '' then
    local step = c.stepped[1] and tonumber(c.stepped[2]) - tonumber(c.stepped[1]) or 0
    renew_members(p, now, step, tonumber(c.members))
  end
  for i, wanted in ipairs(c.leases) do apply(p, leases[i], wanted, now) end
  for _, id in ipairs(c.over) do
    redis.call('DEL', p .. ':errand:' .. id)
    redis.call('ZREM', p .. ':errands', id)
  end
  write_documents(p, c)
  return { 'ok' }
end

-- mark
local function raise_token(keys, a)
  local key = keys[1] .. ':token'
  if less(redis.call('GET', key) or '0', a[1]) then redis.call('SET', key, a[1]) end
  return 'ok'
end

redis.register_function('swapper_1_enqueue', enqueue)
redis.register_function('swapper_1_heartbeat', heartbeat)
redis.register_function('swapper_1_finish', finish)
redis.register_function('swapper_1_commit', commit)
redis.register_function('swapper_1_raise_token', raise_token)
