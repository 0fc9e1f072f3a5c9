// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package once

import (
	"context"
	"iter"
)

// A Store keeps the marks of effects. Package once/bolt has a local one, adapters/nats one
// in JetStream. Handlers do not call it; a [Runner] does.
//
// Keys have 1 to [MaxKey] + 200 bytes of any value. All methods are safe for concurrent
// use.
type Store interface {
	// Claim waits until no living process has key, and takes it. If the effect is already
	// done, Found.Done is true and the Claim is nil. The Claim is not nil with Ask.Over, or
	// if an earlier claim with Ask.Over is in doubt. If ctx ends while another claim holds
	// the key, Claim returns an [*UnderwayError]. A damaged mark is an [ErrInDoubt], except
	// with Ask.Over.
	Claim(ctx context.Context, key string, ask Ask) (Claim, Found, error)

	// Get reads a mark and never waits for a claim. done is false if there is no mark.
	Get(ctx context.Context, key string) (value []byte, done bool, err error)

	// List returns all keys whose first byte is kind, in no order. It reads everything, so
	// it is only for a program's start and for people.
	List(ctx context.Context, kind byte) iter.Seq2[Entry, error]
}

// Ask holds the options of a claim.
type Ask struct {
	// Over claims a key even if its effect is done.
	Over bool
	// Record writes to the disk, before Claim returns, that the effect begins. So the next
	// process knows it after a crash. A store that several processes share always does
	// this.
	Record bool
	// Note is recorded with the beginning and says which step began. A key in doubt keeps
	// its note.
	Note string
}

// Found is what the store knew about a key when it was claimed.
type Found struct {
	Done  bool   // the key has a mark, even if a later claim with Ask.Over is in doubt
	Value []byte // the value that was written with the mark
	// Doubt means that an effect began and nobody knows whether it happened.
	Doubt bool
	Note  string // the note of the claim in doubt
	// Damaged is why the mark could not be read.
	Damaged error
}

// A Claim is the right to run the effect of one key. Exactly one of Finish, Release and
// Leave ends it. A failed Finish may be called again.
type Claim interface {
	// Context is the context of Store.Claim. It also ends when the store lets another
	// process take the key; its cause is then [ErrLost].
	Context() context.Context

	// Finish writes the mark of the key and the entries of also to the disk before it
	// returns. If it fails, also may be written without the key's own mark, never the
	// reverse. The caller holds claims that protect the keys of also.
	Finish(ctx context.Context, value []byte, also ...Entry) error

	// Release undoes the claim. The effect has not happened.
	Release(ctx context.Context) error

	// Leave ends the claim and leaves the key in doubt.
	Leave(ctx context.Context) error
}

// Entry is a key and its value. Only List sets Doubt: for a key in doubt, and for a claimed
// key, whose effect may be under way.
type Entry struct {
	Key   string
	Value []byte
	Doubt bool
	Note  string
	// Damaged is why the entry could not be read.
	Damaged error
}
