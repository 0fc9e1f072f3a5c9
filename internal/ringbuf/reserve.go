// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package ringbuf

// A lane's reserve is room of the shared budget that the lane has taken and does not use.
// Freed room goes into the reserve, and placed messages take room from it. So the lane touches
// the shared budget once for many messages. Reserves must not make the ring full below its
// bound, and must not let it hold more than the bound:
//
//   - Ring.used counts the reserves. So used never exceeds the bound, and held messages never
//     exceed used.
//   - Only lanes in Ring.reserves have a reserve. A Put that finds too little room raises
//     Ring.reclaims, takes all reserves back and looks again before it reports a full ring.
//     Stats does the same, to count held messages only. A Put that goes to sleep raises
//     Ring.asleep, takes all reserves back and offers the room to all waiting Puts.
//   - A lane adds to its reserve under its lock, if it is in Ring.reserves and has then seen
//     both flags down. A reclaim raises its flag, then loads the entries and takes the lanes'
//     locks. So either the lane sees the flag, or the reclaim sees the lane and gets its lock
//     afterwards. No reserve is missed, and no lane gets a new one while the flag is up.
//   - While a Put waits without being woken, asleep stays up. Freed room then goes to the
//     shared budget, and from there to the waiting Puts. A woken Put looks again, and so
//     reclaims, by itself.
//   - A lane that ends gives its reserve back.

const (
	reserveLanes = 16  // lanes that may have a reserve
	reserveMost  = 128 // most messages in a reserve
	reserveLeast = 8   // a ring whose reserves would be smaller has none
	reservePart  = 2   // all reserves together take at most 1/reservePart of the ring
)

func (r *Ring[T]) setReserves() {
	if n := min(reserveMost, r.maxCount/(reservePart*reserveLanes)); n >= reserveLeast {
		r.reserveMax = pack(n, r.maxBytes/(reservePart*reserveLanes))
	}
}

// calm tells whether a lane of Ring.reserves may add to its reserve. The caller must hold the
// lane's lock.
func (r *Ring[T]) calm() bool {
	return !r.asleep.Load() && r.reclaims.Load() == 0
}

// reclaim takes all reserves back. The caller holds no lock of a lane, and has raised a flag:
// until it lowers the flag, no lane gets a reserve again.
func (r *Ring[T]) reclaim() {
	for i := range r.reserves {
		if l := r.reserves[i].Load(); l != nil {
			l.mu.Lock()
			l.yieldLocked()
			l.mu.Unlock()
		}
	}
}

// yieldLocked gives the lane's reserve back, if it has one.
func (l *Lane[T]) yieldLocked() {
	if l.entry == 0 {
		return
	}
	r := l.ring
	r.used.Add(-l.reserve) // before the entry is free: a call that sees the free entry sees the room
	r.reserves[l.entry-1].Store(nil)
	r.crowded.Store(false)
	l.reserve, l.entry = 0, 0
}

// joinLocked gives the lane an entry in Ring.reserves, if one is free.
func (l *Lane[T]) joinLocked() bool {
	r := l.ring
	if r.reserveMax == 0 || r.crowded.Load() {
		return false
	}
	for i := range r.reserves {
		if r.reserves[i].CompareAndSwap(nil, l) {
			l.entry = i + 1
			return true
		}
	}
	r.crowded.Store(true)
	for i := range r.reserves {
		if r.reserves[i].Load() == nil { // its lane may have cleared crowded before the line above
			r.crowded.Store(false)
			break
		}
	}
	return false
}

// takeLocked takes room for as many of p's first k messages as fit. size is their bytes. It
// returns how many fit, and their bytes. Without p it takes room for all or for none.
func (l *Lane[T]) takeLocked(p *parcel[T], k int, size int64) (int, int64) {
	if need := pack(k, size); covers(l.reserve, need) {
		l.reserve -= need
		return k, size
	}
	r := l.ring
	more := uint64(0) // the new reserve
	if (l.entry != 0 || l.joinLocked()) && r.calm() {
		n := int(r.reserveMax>>bytesBits) / 2
		more = pack(n, min(size/int64(k)*int64(n), int64(r.reserveMax&maxBytes)/2))
	}
	for {
		u := r.used.Load()
		free := r.bound - (u - l.reserve)
		if need := pack(k, size); !covers(free, need) {
			if p == nil {
				return 0, 0
			}
			if k, size = p.fit(min(k, int(free>>bytesBits)), int64(free&maxBytes)); k == 0 {
				return 0, 0
			}
		}
		need := pack(k, size)
		if !covers(free-need, more) {
			more = 0
		}
		if r.used.CompareAndSwap(u, u-l.reserve+need+more) {
			l.reserve = more
			return k, size
		}
	}
}

// freeLocked gives room back, to the lane's reserve or to the shared budget. It runs under the
// lane's lock, so that no call sees the lane without the messages while the ring still counts
// them. The caller must call Ring.wake after it has released the lock.
func (l *Lane[T]) freeLocked(n int, bytes int64) {
	r := l.ring
	freed := pack(n, bytes)
	if l.entry == 0 || !r.calm() {
		r.used.Add(-freed)
		return
	}
	l.reserve += freed
	if !covers(r.reserveMax, l.reserve) {
		l.trimLocked()
	}
}

// trimLocked cuts the reserve to half of its largest size, and gives the rest back.
func (l *Lane[T]) trimLocked() {
	r, all := l.ring, l.reserve
	l.reserve = pack(
		min(int(all>>bytesBits), int(r.reserveMax>>bytesBits)/2),
		min(int64(all&maxBytes), int64(r.reserveMax&maxBytes)/2),
	)
	r.used.Add(l.reserve - all)
}

// pack puts messages and bytes into one word, as in Ring.used.
func pack(n int, bytes int64) uint64 { return uint64(n)<<bytesBits | uint64(bytes) }

// covers tells whether room is enough for need, in messages and in bytes.
func covers(room, need uint64) bool {
	return room>>bytesBits >= need>>bytesBits && room&maxBytes >= need&maxBytes
}
