// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"reflect"
	"sync"

	"github.com/rabbitmq/amqp091-go"
)

// These functions read facts about a channel for which the client has no method. They use
// reflection. If another version of the client keeps a fact elsewhere, it is unknown.

// recovers tells whether the channel's connection has the client's own recovery.
func recovers(ch *amqp091.Channel) bool {
	conn := field(reflect.ValueOf(ch), "connection")
	recovery := field(field(conn, "Config"), "Recovery")
	return recovery.IsValid() && recovery.Kind() == reflect.Pointer && !recovery.IsNil()
}

// connectionOf returns a channel's connection; nil if the client does not tell.
func connectionOf(ch *amqp091.Channel) *amqp091.Connection {
	v := reflect.ValueOf(ch).Elem().FieldByName("connection")
	if !v.IsValid() || v.Type() != reflect.TypeFor[*amqp091.Connection]() {
		return nil
	}
	return (*amqp091.Connection)(v.UnsafePointer())
}

// versionOf returns the version of a channel's broker, 0 if the client does not tell. A
// connection's properties do not change once it is connected.
func versionOf(ch *amqp091.Channel) [2]int {
	properties := field(field(reflect.ValueOf(ch), "connection"), "Properties")
	if !properties.IsValid() || properties.Type() != reflect.TypeFor[amqp091.Table]() {
		return [2]int{}
	}
	v := properties.MapIndex(reflect.ValueOf("version"))
	if v.IsValid() && v.Kind() == reflect.Interface {
		v = v.Elem()
	}
	if !v.IsValid() || v.Kind() != reflect.String {
		return [2]int{}
	}
	return version(v.String())
}

// consumerOf describes a channel's consumer. ok is false unless there is exactly one, and if the
// client does not tell.
func consumerOf(ch *amqp091.Channel) (queue, tag string, autoAck, ok bool) {
	subs := field(reflect.ValueOf(ch), "consumers")
	lock, configs := field(subs, "Mutex"), field(subs, "configs")
	if !lock.IsValid() || lock.Type() != reflect.TypeFor[sync.Mutex]() || !lock.CanAddr() ||
		!configs.IsValid() || configs.Kind() != reflect.Map {
		return "", "", false, false
	}
	mu := (*sync.Mutex)(lock.Addr().UnsafePointer()) // the client writes the map under this lock
	mu.Lock()
	defer mu.Unlock()
	if configs.Len() != 1 {
		return "", "", false, false
	}
	for it := configs.MapRange(); it.Next(); {
		q, a := field(it.Value(), "Queue"), field(it.Value(), "AutoAck")
		if q.IsValid() && q.Kind() == reflect.String && a.IsValid() && a.Kind() == reflect.Bool {
			queue, tag, autoAck, ok = q.String(), it.Key().String(), a.Bool(), true
		}
	}
	return queue, tag, autoAck, ok
}

// field returns a field of a struct, or of the struct that a pointer leads to; invalid if there is
// none.
func field(v reflect.Value, name string) reflect.Value {
	for v.IsValid() && v.Kind() == reflect.Pointer {
		v = v.Elem()
	}
	if !v.IsValid() || v.Kind() != reflect.Struct {
		return reflect.Value{}
	}
	return v.FieldByName(name)
}
