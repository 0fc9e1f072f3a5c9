// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package once

import (
	"context"
	"iter"
)

// A Store keeps the marks of effects. once/bolt has the local one, adapters/nats the one
// in JetStream. A handler does not call it: a [Runner] does.
//
// Keys are 1 to [MaxKey] + 200 bytes of any value. All methods are safe for concurrent use.
type Store interface {
	// Claim waits until no living process has key, and takes it. If its effect is done
	// already, Found.Done is true and the Claim is nil, except with Ask.Over. When ctx
	// ends while another has the key, Claim returns an [*UnderwayError]. Without Ask.Over, a
	// damaged mark is an [ErrInDoubt].
	Claim(ctx context.Context, key string, ask Ask) (Claim, Found, error)

	// Get reads a mark without waiting for anybody. done is false while there is none.
	Get(ctx context.Context, key string) (value []byte, done bool, err error)

	// List goes through all keys whose first byte is kind, in no order. It is for a
	// start and for people: it costs a read of everything.
	List(ctx context.Context, kind byte) iter.Seq2[Entry, error]
}

// Ask is how a key is claimed.
type Ask struct {
	// Over claims a key also if it is done.
	Over bool
	// Record has the beginning on the disk before Claim returns, so that the next
	// process sees it after a crash. A store that several processes share does so
	// in any case.
	Record bool
	// Note is recorded with the beginning: what began. A key in doubt keeps its note.
	Note string
}

// Found is what a store knew of a key when it was claimed.
type Found struct {
	Done  bool   // there is a mark, also if a claim over it is in doubt
	Value []byte // that the mark was written with
	// Doubt means that an effect began and nobody knows whether it happened.
	Doubt bool
	Note  string // of the claim that is in doubt
	// Damaged is why the mark could not be read.
	Damaged error
}

// A Claim is the right to run the effect of one key. Exactly one of Finish, Release and
// Leave ends it; a Finish that failed may be called again.
type Claim interface {
	// Context is that of Store.Claim. It also ends when the store lets another process
	// take the key, with [ErrLost] as the cause.
	Context() context.Context

	// Finish has the mark, and those of other keys, on the disk before it returns. The
	// others may be written without the key's own if it fails, never the reverse. The
	// caller has claims that keep everybody else from those keys.
	Finish(ctx context.Context, value []byte, also ...Entry) error

	// Release undoes the claim: nothing has happened.
	Release(ctx context.Context) error

	// Leave keeps the key in doubt.
	Leave(ctx context.Context) error
}

// Entry is a key and its value. Doubt is set by List only, for a key that is in doubt, and
// for one that is claimed and may be under way.
type Entry struct {
	Key   string
	Value []byte
	Doubt bool
	Note  string
	// Damaged is why the entry could not be read.
	Damaged error
}
